"""HF datasets: rows come back with all their types, without pickle; one column as plain bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ffrecord import FileReader, FileWriter
from ffrecord.convert import Options, convert
from ffrecord.convert.huggingface import read_row, row_schema
from tests.ffrecord.convert.conftest import rows_of

datasets = pytest.importorskip("datasets")


@pytest.fixture
def saved(tmp_path: Path) -> Any:
    features = datasets.Features(
        {
            "id": datasets.Value("int32"),
            "text": datasets.Value("string"),
            "image": datasets.Image(decode=False),
            "label": datasets.ClassLabel(names=["cat", "dog"]),
            "boxes": [[datasets.Value("float32")]],
            "maybe": datasets.Value("float64"),
        }
    )
    rows = [
        {
            "id": number,
            "text": "ü" * number,
            "image": {"bytes": bytes([number]) * 50, "path": None},
            "label": number % 2,
            "boxes": [[0.5, float(number)]] * (number % 3),
            "maybe": None if number % 2 else 0.25,
        }
        for number in range(25)
    ]
    data = datasets.Dataset.from_list(rows, features=features)
    data.save_to_disk(str(tmp_path / "saved"))
    return data


def test_rows_come_back_with_their_types(saved: Any, tmp_path: Path) -> None:
    convert([tmp_path / "saved"], tmp_path / "a.ffr")
    convert([tmp_path / "a.ffr"], tmp_path / "again", target_format="huggingface")
    again = datasets.load_from_disk(str(tmp_path / "again"))
    assert again.features == saved.features
    assert again.to_list() == saved.to_list()


def test_a_row_is_read_alone(saved: Any, tmp_path: Path) -> None:
    convert([tmp_path / "saved"], tmp_path / "a.ffr")
    reader = FileReader(tmp_path / "a.ffr")
    schema = row_schema(reader.get_schema(0))
    for index in (0, 7, 24):
        assert read_row(reader.read_one(index), schema) == saved[index]
    assert b"pickle" not in (tmp_path / "a.ffr").read_bytes()


def test_a_subset_is_read_in_its_own_order(saved: Any, tmp_path: Path) -> None:
    saved.select([9, 2, 9]).save_to_disk(str(tmp_path / "some"))
    convert([tmp_path / "some"], tmp_path / "a.ffr")
    reader = FileReader(tmp_path / "a.ffr")
    schema = row_schema(reader.get_schema(0))
    assert [read_row(record, schema)["id"] for record in reader] == [9, 2, 9]


@pytest.mark.parametrize(
    ("column", "expected"), [("image", b"\x03" * 50), ("text", "üüü".encode())]
)
def test_a_column_makes_plain_records(
    column: str, expected: bytes, saved: Any, tmp_path: Path
) -> None:
    convert([tmp_path / "saved"], tmp_path / "a.ffr", options=Options(column=column))
    assert rows_of(tmp_path / "a.ffr")[3] == (None, expected)


@pytest.mark.parametrize(
    ("column", "words"),
    [("nothing", "no column 'nothing': it has id, text"), ("id", "row 0, column 'id' is int")],
)
def test_a_column_that_cannot_be_is_refused(
    column: str, words: str, saved: Any, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=words):
        convert([tmp_path / "saved"], tmp_path / "a.ffr", options=Options(column=column))
    assert not (tmp_path / "a.ffr").exists()


def test_splits_are_converted_one_by_one(saved: Any, tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": saved, "test": saved.select(range(3))})
    both.save_to_disk(str(tmp_path / "both"))
    with pytest.raises(ValueError, match=r"splits train, test: convert one, such as .*train"):
        convert([tmp_path / "both"], tmp_path / "a.ffr")
    assert convert([tmp_path / "both" / "test"], tmp_path / "a.ffr").records == 3


def test_a_row_that_is_none_is_refused(tmp_path: Path) -> None:
    schema = {"arrow_schema": "AAAA"}
    with FileWriter(tmp_path / "a.ffr", 1, schema=schema) as writer:
        writer.write_one(b"nonsense")
    with pytest.raises(ValueError, match="Arrow schema is damaged"):
        convert([tmp_path / "a.ffr"], tmp_path / "out", target_format="huggingface")
    with pytest.raises(ValueError, match="no Arrow schema"):
        row_schema(None)
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]
