"""LMDB: pairs in the order of keys, whatever the library itself wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from ffrecord.convert import Options, convert
from tests.ffrecord.convert.conftest import rows_of, write_rows

lmdb = pytest.importorskip("lmdb")


@pytest.mark.parametrize("subdir", [True, False])
def test_a_database_of_the_library_is_read_in_the_order_of_keys(
    subdir: bool, tmp_path: Path
) -> None:
    path = tmp_path / "a.lmdb"
    with lmdb.open(str(path), subdir=subdir) as environment, environment.begin(write=True) as pairs:
        for number in (5, 1, 3):
            pairs.put(b"k%d" % number, bytes(number * 1000))
    convert([path], tmp_path / "a.ffr")
    assert rows_of(tmp_path / "a.ffr") == [(f"k{n}", bytes(n * 1000)) for n in (1, 3, 5)]


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    rows: list[tuple[str | None, bytes]] = [(f"ä{n:03d}", bytes([n]) * n) for n in range(200)]
    convert([write_rows(tmp_path / "a.ffr", rows)], tmp_path / "a.lmdb")
    assert [path.name for path in (tmp_path / "a.lmdb").iterdir()] == ["data.mdb"]
    opened = lmdb.open(str(tmp_path / "a.lmdb"), readonly=True, lock=False)
    with opened as environment, environment.begin() as pairs:
        assert [(key.decode(), value) for key, value in pairs.cursor()] == rows


def test_a_map_that_is_full_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ffrecord.convert.lmdb._MAP_BYTES", 1 << 20)
    rows: list[tuple[str | None, bytes]] = [(f"{n:04d}", bytes(20_000)) for n in range(300)]
    convert([write_rows(tmp_path / "a.ffr", rows)], tmp_path / "a.lmdb")
    convert([tmp_path / "a.lmdb"], tmp_path / "b.ffr")
    assert rows_of(tmp_path / "b.ffr") == rows


def test_keys_that_are_no_text_are_refused_with_the_way_out(tmp_path: Path) -> None:
    with lmdb.open(str(tmp_path / "a.lmdb")) as environment, environment.begin(write=True) as pairs:
        pairs.put(b"\xff\xfe", b"x")
    with pytest.raises(ValueError, match=r"no UTF-8.*--no-keys"):
        convert([tmp_path / "a.lmdb"], tmp_path / "a.ffr")
    convert([tmp_path / "a.lmdb"], tmp_path / "a.ffr", options=Options(keys=False))
    assert rows_of(tmp_path / "a.ffr") == [(None, b"x")]


@pytest.mark.parametrize(
    ("key", "words"), [("x" * 600, "600 bytes: LMDB takes 1 to 511"), ("", "0 bytes")]
)
def test_keys_that_lmdb_cannot_hold_are_refused(key: str, words: str, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "a.ffr", [("fine", b"x"), (key, b"y")])
    with pytest.raises(ValueError, match=words):
        convert([source], tmp_path / "a.lmdb")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.ffr", [("k", b"x")])
    with pytest.raises(ValueError, match="'k' is there twice"):
        convert([tmp_path / "a.ffr"] * 2, tmp_path / "a.lmdb")
