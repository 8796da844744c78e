"""Record files as a source and as a target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from ffrecord import folder_index
from ffrecord.convert.model import Counts, Entry, Options, Source
from ffrecord.folder import PackedFolder
from ffrecord.folder_index import MAGIC, Tree
from ffrecord.parts import PartWriter
from ffrecord.reader import FileReader
from ffrecord.writer import FileWriter


def open_source(path: Path, options: Options) -> Source:
    """Read a record file or a directory of parts.

    The files of a packed folder are entries whose keys are their paths.
    """
    reader = FileReader(path)
    if reader.n and reader.read_one(-1)[: len(MAGIC)].tobytes() == MAGIC:
        reader.close()
        packed = PackedFolder(path)
        tree = packed.tree if _is_in_order(packed.tree) else None
        return Source(_files(packed), packed.num_files(), tree=tree)
    keys = keys_of(reader) if options.keys else {}
    count = len(reader.fnames)
    texts = [(reader.get_metadata(number), reader.get_schema(number)) for number in range(count)]
    metadata, schema = texts[0] if all(text == texts[0] for text in texts) else (None, None)
    return Source(_records(reader, keys), reader.n, metadata, schema)


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write one record file, or a directory of parts, or a packed folder."""
    if source.tree is not None and options.part_bytes is None:
        return _write_tree(path, source, source.tree)
    metadata, schema = source.metadata, source.schema
    if options.part_bytes is not None:
        with PartWriter(path, options.part_bytes, metadata=metadata, schema=schema) as parts:
            for entry in source.entries:
                parts.write_one(entry.data, entry.key if options.keys else None)
        return Counts(parts.count, parts.files)
    n = None if options.keys else source.total
    with FileWriter(path, n, metadata=metadata, schema=schema) as writer:
        for entry in source.entries:
            writer.write_one(entry.data, entry.key if options.keys else None)
    return Counts(writer.count)


def keys_of(reader: FileReader) -> dict[int, str]:
    """Return the key of every record that has one, by the record's index in the reader."""
    found: dict[int, str] = {}
    base = 0
    for part in reader._open_set().parts:
        index = part.keys()
        if index is not None:
            for number in range(len(index)):
                found[base + index.record(number)] = index.key(number)
        base += part.header.n
    return found


def _write_tree(path: Path, source: Source, tree: Tree) -> Counts:
    """Write a packed folder; its entries come in the order of its tree."""
    assert source.total is not None
    with FileWriter(path, source.total + 1) as writer:
        for entry in source.entries:
            writer.write_one(entry.data)
        writer.write_one(folder_index.encode(tree))
    return Counts(source.total)


def _is_in_order(tree: Tree) -> bool:
    records = [record for _, record in folder_index.walk(tree) if record is not None]
    return sorted(records) == list(range(len(records)))


def _records(reader: FileReader, keys: dict[int, str]) -> Iterator[Entry]:
    with reader:
        for first, last in reader.pieces():
            batch = reader.read(range(first, last), writable=False)
            for index, data in enumerate(batch, first):
                yield Entry(data, keys.get(index))


def _files(packed: PackedFolder) -> Iterator[Entry]:
    names: dict[int, list[str]] = {}
    for name, record in folder_index.walk(packed.tree):
        if record is not None:
            names.setdefault(record, []).append(name)
    with packed:
        for first, last in packed.reader.pieces():
            wanted = [record for record in range(first, last) if record in names]
            for record, data in zip(wanted, packed.reader.read(wanted), strict=True):
                for name in names[record]:
                    yield Entry(data, os.fspath(name))
