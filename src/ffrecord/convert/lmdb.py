"""LMDB: each pair of the unnamed database is a record, its key the record's key if it is UTF-8."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from ffrecord.convert.model import Counts, Entry, Options, Source, library, named
from ffrecord.whole import whole_directory
from ffrecord.writer import BufferLike

# Pairs and bytes of a transaction, and the size of the map to begin with; it grows as needed.
_BATCH = 1000
_BATCH_BYTES = 64 << 20
_MAP_BYTES = 256 << 20


def open_source(path: Path, options: Options) -> Source:
    """Read a database in the order of its keys."""
    lmdb = library("lmdb", "lmdb", "LMDB")
    try:
        environment = lmdb.open(
            str(path), readonly=True, lock=False, subdir=path.is_dir(), readahead=False
        )
    except lmdb.Error as error:
        raise ValueError(f"{path} is damaged, or no LMDB database: {error}") from error
    return Source(_entries(environment, path, options.keys, lmdb), environment.stat()["entries"])


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write a database; records without a key get their place as ten digits.

    Raises:
        ValueError: A key is empty, too long for LMDB, or there twice.
    """
    lmdb = library("lmdb", "lmdb", "LMDB")
    with whole_directory(path) as work:
        with lmdb.open(str(work), map_size=_MAP_BYTES) as environment:
            count = 0
            pairs = named(source.entries)
            while batch := list(_batch(pairs)):
                _put(environment, batch, lmdb)
                count += len(batch)
            environment.sync(True)
        (work / "lock.mdb").unlink(missing_ok=True)  # it belongs to this process
    return Counts(count)


def _entries(environment: Any, path: Path, keys: bool, lmdb: Any) -> Iterator[Entry]:
    try:
        with environment, environment.begin(buffers=False) as transaction:
            for key, value in transaction.cursor():
                yield Entry(value, _text(key, path) if keys else None)
    except lmdb.Error as error:
        raise ValueError(f"{path} is damaged: {error}") from error


def _text(key: bytes, path: Path) -> str:
    try:
        return key.decode()
    except UnicodeDecodeError:
        raise ValueError(
            f"{path}: the key {key!r} is no UTF-8, as keys of records are: "
            "convert without keys (--no-keys)"
        ) from None


def _batch(pairs: Iterator[tuple[str, BufferLike]]) -> Iterator[tuple[str, bytes]]:
    size = 0
    for key, data in islice(pairs, _BATCH):
        content = bytes(data)
        yield key, content
        size += len(content)
        if size >= _BATCH_BYTES:
            return


def _put(environment: Any, batch: list[tuple[str, bytes]], lmdb: Any) -> None:
    """Write pairs in one transaction; where the map is full, in a larger one again."""
    while True:
        try:
            with environment.begin(write=True) as transaction:
                for key, data in batch:
                    if not transaction.put(key.encode(), data, overwrite=False):
                        raise ValueError(f"the key {key!r} is there twice")
            return
        except lmdb.MapFullError:
            environment.set_mapsize(2 * environment.info()["map_size"])
        except lmdb.BadValsizeError:
            bad = next(key for key, _ in batch if not 0 < len(key.encode()) <= 511)
            raise ValueError(
                f"the key {bad[:40]!r} has {len(bad.encode())} bytes: LMDB takes 1 to 511"
            ) from None
