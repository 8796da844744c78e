"""ArrayRecord files: the records as they are. Keys are not kept: there is no place for them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ffrecord.convert.model import Counts, Entry, Options, Source, library
from ffrecord.whole import whole_file

_BATCH = 256


def open_source(path: Path, options: Options) -> Source:
    """Read a file from start to end."""
    reader = _module().ArrayRecordReader(str(path), "readahead_buffer_size:0")
    if not reader.ok():
        raise ValueError(f"{path} is damaged, or no ArrayRecord file")
    total = int(reader.num_records())
    return Source(_entries(reader, total, path), total)


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write a file for random access: each record is compressed alone (group_size:1)."""
    count = 0
    with whole_file(path) as work:
        writer = _module().ArrayRecordWriter(str(work), "group_size:1")
        for entry in source.entries:
            writer.write(bytes(entry.data))
            count += 1
        written = writer.ok()
        writer.close()
        if not written:
            raise OSError(f"{path} cannot be written as ArrayRecord")
    return Counts(count)


def _entries(reader: Any, total: int, path: Path) -> Iterator[Entry]:
    try:
        for start in range(0, total, _BATCH):
            for data in reader.read(start, min(start + _BATCH, total)):
                yield Entry(data)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    finally:
        reader.close()


def _module() -> Any:
    return library("array_record.python.array_record_module", "array-record", "ArrayRecord")
