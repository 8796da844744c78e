"""Folders of files: packed by `pack_folder`'s rules, and written from any record file."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

from ffrecord import folder_index
from ffrecord.convert.model import Counts, Entry, Options, Source, named
from ffrecord.files import FilesWriter, read_files
from ffrecord.folder import report_collisions
from ffrecord.folder_scan import scan
from ffrecord.names import unsafe
from ffrecord.whole import whole_directory
from ffrecord.writer import BufferLike, as_view

# Files that are written at a time.
_BATCH = 256
_BATCH_BYTES = 8 << 20


def open_source(path: Path, options: Options) -> Source:
    """Read the files of a folder, depth first, names sorted in each directory."""
    scanned = scan(path)
    report_collisions(folder_index.paths(scanned.tree), str(path))
    names = folder_index.files(scanned.tree)
    files = read_files(scanned.paths)
    entries = (Entry(data, name) for name, data in zip(names, files, strict=True))
    return Source(entries, len(names), tree=scanned.tree)


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write each record as a file: named by its key, else by its place as ten digits and ".bin".

    Raises:
        ValueError: A key would lead out of the folder.
    """
    written: list[str] = []
    with whole_directory(path) as work, FilesWriter(work) as files:
        for name, record in folder_index.walk(source.tree or OrderedDict()):
            if record is None:
                (work / name).mkdir()
        for batch in _batches(named(source.entries, ".bin")):
            for name, _ in batch:
                _check(name)
                (work / name).parent.mkdir(parents=True, exist_ok=True)
            files.write(batch)
            written += [name for name, _ in batch]
        report_collisions(written, str(path))
    return Counts(len(written), len(written))


def _check(name: str) -> None:
    for component in name.split("/"):
        if reason := unsafe(component):
            raise ValueError(f"the key {name!r} is no path in a folder: {component!r} {reason}")


def _batches(
    items: Iterator[tuple[str, BufferLike]],
) -> Iterator[list[tuple[str, BufferLike]]]:
    batch: list[tuple[str, BufferLike]] = []
    size = 0
    for name, data in items:
        batch.append((name, data))
        size += as_view(data).nbytes
        if len(batch) >= _BATCH or size >= _BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
