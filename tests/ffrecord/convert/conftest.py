"""Records with and without keys, and a way to read any record file back."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from ffrecord import FileReader, FileWriter
from ffrecord.convert.records import keys_of

Rows = list[tuple[str | None, bytes]]


def rows_of(path: Path) -> Rows:
    """Keys and records of a file, in order."""
    with FileReader(path) as reader:
        keys = keys_of(reader)
        return [(keys.get(index), record.tobytes()) for index, record in enumerate(reader)]


def write_rows(path: Path, rows: Rows) -> Path:
    with FileWriter(path) as writer:
        for key, data in rows:
            writer.write_one(data, key=key)
    return path


@pytest.fixture(scope="session")
def keyed() -> Rows:
    """Three samples of two fields, sorted by key; one record is empty, one is large."""
    source = random.Random(3)
    sizes = [4000, 1, 0, 2, 300_000, 1]
    names = [f"set/{number:04d}.{field}" for number in range(3) for field in ("cls", "jpg")]
    return [(name, source.randbytes(size)) for name, size in zip(names, sizes, strict=True)]


@pytest.fixture
def source(keyed: Rows, tmp_path: Path) -> Path:
    return write_rows(tmp_path / "source.ffr", keyed)


@pytest.fixture
def plain(keyed: Rows, tmp_path: Path) -> Path:
    return write_rows(tmp_path / "plain.ffr", [(None, data) for _, data in keyed])
