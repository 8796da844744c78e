"""The writer of parts: sizes, keys, and a directory that is whole or not there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ffrecord import FileReader, PartWriter


def test_parts_end_once_they_have_their_bytes(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "set.ffr", 1000, metadata={"a": 1}) as writer:
        for index in range(10):
            writer.write_one(np.full((10, 10), index, np.float32))  # 400 bytes
    assert (writer.count, writer.files) == (10, 4)
    reader = FileReader(tmp_path / "set.ffr")
    assert [len(reader.get_checksums(k)) for k in range(4)] == [3, 3, 3, 1]
    assert [record.view(np.float32)[0] for record in reader] == list(range(10))
    assert reader.get_metadata(3) == {"a": 1}


def test_keys_are_found_in_any_part(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "set.ffr", 1) as writer:
        for index in range(5):
            writer.write_one(b"x", key=f"k{index}")
    reader = FileReader(tmp_path / "set.ffr")
    assert [reader.index_of(f"k{index}") for index in range(5)] == list(range(5))


def test_nothing_written_is_one_empty_part(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "set.ffr")
    writer.close()
    writer.close()
    assert FileReader(tmp_path / "set.ffr").n == 0


@pytest.mark.parametrize("written", [0, 1, 7])
def test_an_exception_leaves_nothing_and_comes_through(written: int, tmp_path: Path) -> None:
    def fail() -> None:
        with PartWriter(tmp_path / "set.ffr", 100) as writer:
            for _ in range(written):
                writer.write_one(b"x" * 60)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_record_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "set.ffr") as writer:
        with pytest.raises(TypeError, match="buffer protocol"):
            writer.write_one("text")  # type: ignore[arg-type]
        writer.write_one(b"x")
    assert FileReader(tmp_path / "set.ffr").n == 1


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "set.ffr").mkdir()
    PartWriter(tmp_path / "set.ffr").close()  # an empty one may be filled
    with pytest.raises(FileExistsError, match="not an empty directory"):
        PartWriter(tmp_path / "set.ffr")
    with pytest.raises(ValueError, match="part_bytes is 0"):
        PartWriter(tmp_path / "other.ffr", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["set.ffr"]
