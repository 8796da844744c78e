"""The disk under a benchmark: pages dropped from the cache, and what it gives at best."""

from __future__ import annotations

import mmap
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.libaio import Context
from ffrecord import FileReader
from ffrecord.measure import cached_share

_PAGE = 4096
_GROUP = 8  # reads that are submitted together


def drop(directory: Path) -> None:
    """Drop the pages of all files below a directory from the page cache; mapped ones stay."""
    for path in files(directory):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def files(directory: Path) -> list[Path]:
    """Return all files below a directory."""
    return [Path(folder, name) for folder, _, names in os.walk(directory) for name in names]


def left(directory: Path) -> float:
    """Return the share of a directory's bytes that is in the page cache, about, 0 to 1."""
    paths = files(directory)
    chosen = random.Random(0).sample(paths, min(len(paths), 64))
    return cached_share([str(path) for path in chosen if path.stat().st_size], random.Random(0))


@contextmanager
def probe(path: Path) -> Iterator[object]:
    """Open the disk's own rate: Linux AIO past the cache, 64 at a time, nothing copied or checked.

    Gives a function that reads the pages around the records of a batch.
    """
    with FileReader(path) as reader:
        offsets = reader.get_offsets(0)
    starts = offsets[:-1] & -_PAGE
    lengths = ((offsets[1:] + _PAGE - 1) & -_PAGE) - starts
    depth, longest = 64, int(lengths.max())
    # Huge pages, touched before: a read then is a few segments for the disk, and no page fault.
    memory = mmap.mmap(-1, depth * longest)
    memory.madvise(mmap.MADV_HUGEPAGE)
    memory[:] = bytes(len(memory))
    base = np.frombuffer(memory, np.uint8).ctypes.data
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT)
    context = Context(depth)

    def read(batch: list[int]) -> list[int]:
        wanted = np.array(batch)
        for first in range(0, len(wanted), _GROUP):
            while context.waiting > depth - _GROUP:
                context.wait(1)
            part = wanted[first : first + _GROUP]
            # What is read is not looked at, so that a place may be written twice.
            places = base + (np.arange(first, first + len(part)) % depth) * longest
            context.submit(descriptor, places, lengths[part], starts[part])
        context.wait(context.waiting)
        return batch

    try:
        yield read
    finally:
        context.close()
        os.close(descriptor)
