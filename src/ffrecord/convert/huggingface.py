"""Data sets of Hugging Face's `datasets`, as `save_to_disk` leaves them.

A row is one record: an Arrow record batch of one row, in IPC form without its schema
(arrow.apache.org/docs/format/Columnar.html, "Encapsulated message format"). The schema, features
and all, stands once in the file's extension block as base64 under "arrow_schema". So all types come
back as they were, and no pickle is needed. To read a row:

    schema = row_schema(reader.get_schema(0))
    row = read_row(reader.read_one(7), schema)       # a dictionary

With `column` a record is that column's bytes, or its text in UTF-8.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ffrecord.convert.model import Counts, Entry, Options, Source, library
from ffrecord.whole import whole_directory

KEY = "arrow_schema"
_BATCH = 1000


def row_schema(schema: Mapping[str, Any] | None) -> Any:
    """Return the `pyarrow.Schema` of rows.

    Args:
        schema: As `FileReader.get_schema` returns it.

    Raises:
        ValueError: The records are no rows.
    """
    if not schema or KEY not in schema:
        raise ValueError("the records are no rows: their file has no Arrow schema")
    pyarrow = library("pyarrow", "pyarrow", "reading rows")
    try:
        return pyarrow.ipc.read_schema(pyarrow.py_buffer(base64.b64decode(schema[KEY])))
    except (ValueError, TypeError, OSError) as error:
        raise ValueError(f"the file's Arrow schema is damaged: {error}") from error


def read_row(record: Any, schema: Any) -> dict[str, Any]:
    """Return a record as a dictionary: a value for each column.

    Args:
        record: Its bytes.
        schema: From `row_schema`.
    """
    rows: list[dict[str, Any]] = _batch_of(record, schema).to_pylist()
    return rows[0]


def open_source(path: Path, options: Options) -> Source:
    """Read a saved data set; one of several splits is refused by naming them."""
    datasets = library("datasets", "datasets", "HF datasets")
    if _has_no_rows(path):
        return Source(iter(()), 0)
    loaded = datasets.load_from_disk(str(path))
    if isinstance(loaded, datasets.DatasetDict):
        raise ValueError(
            f"{path} has the splits {', '.join(loaded)}: convert one, such as "
            f"{path / next(iter(loaded), '')}"
        )
    table = loaded.with_format("arrow")
    if options.column is None:
        schema = table[:0].schema
        text = base64.b64encode(schema.serialize().to_pybytes()).decode()
        return Source(_rows(table), len(table), schema={KEY: text})
    if options.column not in loaded.column_names:
        raise ValueError(
            f"{path} has no column {options.column!r}: it has {', '.join(loaded.column_names)}"
        )
    return Source(_column(table, options.column), len(table))


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write a data set for `load_from_disk`.

    Rows become rows again. Other records become a column "record" of bytes, with a column "key"
    where the first record has one.
    """
    datasets = library("datasets", "datasets", "HF datasets")
    pyarrow = library("pyarrow", "pyarrow", "HF datasets")
    count = 0
    with whole_directory(path) as work:
        # The table is spooled to a file and mapped: it need not fit into memory.
        spool = work / "rows.arrow"
        entries = _Peeked(source.entries)
        schema, batches = _table(source, entries, pyarrow)
        with pyarrow.OSFile(str(spool), "wb") as file, pyarrow.ipc.new_stream(file, schema) as out:
            for batch in batches:
                out.write_batch(batch)
                count += batch.num_rows
        with pyarrow.memory_map(str(spool)) as mapped:
            table = pyarrow.ipc.open_stream(mapped).read_all()
            data = datasets.Dataset(datasets.table.InMemoryTable(table))
            with _no_bar(datasets):
                data.save_to_disk(str(work / "out"))
            del table, data
        spool.unlink()
        for file in (work / "out").iterdir():
            file.rename(work / file.name)
        (work / "out").rmdir()
    return Counts(count)


def _has_no_rows(path: Path) -> bool:
    """Say whether a saved set has no files, which the library writes but cannot load (5.2)."""
    try:
        state = json.loads((path / "state.json").read_text())
    except (OSError, ValueError):
        return False
    return isinstance(state, dict) and state.get("_data_files") == []


@contextlib.contextmanager
def _no_bar(datasets: Any) -> Iterator[None]:
    """Keep the library from drawing its own progress over ours."""
    shown = datasets.is_progress_bar_enabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def _table(source: Source, entries: _Peeked, pyarrow: Any) -> tuple[Any, Iterator[Any]]:
    """Return the schema of the data set and its batches."""
    if source.schema and KEY in source.schema:
        schema = row_schema(source.schema)
        return schema, (_batch_of(entry.data, schema) for entry in entries)
    keyed = entries.first is not None and entries.first.key is not None
    fields = [("record", pyarrow.large_binary())] + ([("key", pyarrow.string())] if keyed else [])
    schema = pyarrow.schema(fields)

    def batches() -> Iterator[Any]:
        for entry in entries:
            columns = [[bytes(entry.data)]] + ([[entry.key]] if keyed else [])
            yield pyarrow.record_batch(columns, schema=schema)

    return schema, batches()


class _Peeked:
    """Entries whose first one is known before they are read."""

    def __init__(self, entries: Iterator[Entry]) -> None:
        self._entries = entries
        self.first = next(entries, None)

    def __iter__(self) -> Iterator[Entry]:
        if self.first is not None:
            yield self.first
            yield from self._entries


def _batch_of(record: Any, schema: Any) -> Any:
    pyarrow = library("pyarrow", "pyarrow", "reading rows")
    try:
        return pyarrow.ipc.read_record_batch(pyarrow.py_buffer(bytes(record)), schema)
    except (ValueError, OSError) as error:
        raise ValueError(f"a record is no row: {error}") from error


def _rows(table: Any) -> Iterator[Entry]:
    for start in range(0, len(table), _BATCH):
        for batch in table[start : start + _BATCH].combine_chunks().to_batches():
            for number in range(batch.num_rows):
                yield Entry(batch.slice(number, 1).serialize().to_pybytes())


def _column(table: Any, name: str) -> Iterator[Entry]:
    for start in range(0, len(table), _BATCH):
        values = table[start : start + _BATCH][name].to_pylist()
        for number, value in enumerate(values, start):
            if isinstance(value, dict) and "bytes" in value:  # an image or a sound, not decoded
                value = value["bytes"]
            data = value.encode() if isinstance(value, str) else value
            if not isinstance(data, bytes):
                raise ValueError(
                    f"row {number}, column {name!r} is {type(value).__name__}: a record is bytes "
                    "or text; convert whole rows, without a column"
                )
            yield Entry(data)
