"""How fast a user's own record files are read in random batches: by engine, cold and hot.

All ways of reading take turns, each round starting with another one, because disks and neighbours
change from minute to minute: compare ratios of one round, not figures of two runs. Cold: the files'
pages are dropped from the page cache before each turn, and how much stayed is told. Hot: batches
come from a part of the records that is read once before.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ffrecord import engines
from ffrecord.fileset import FileSet
from ffrecord.reader import FileReader

PLAIN = "pread loop"
"""The way to compare with: one `os.pread` a record, without checksums."""

# Hot batches come from so many bytes, and from no more than this part of the memory that is left.
_HOT_BYTES = 256 << 20
_HOT_PART = 0.25
# Files that the plain loop keeps open, of a set that may have thousands.
_MOST_OPEN = 256
# Records of a turn, at most.
_MOST = 200_000
# What is looked at to estimate how much of the files is in the page cache.
_WINDOWS = 64
_WINDOW = 4 << 20

Read = Callable[[list[int]], object]


@dataclass
class Row:
    """One way of reading at one temperature; a figure for each round.

    Attributes:
        way: An engine, or `PLAIN`.
        cache: "cold" or "hot".
        records: Records a second.
        bytes: Bytes a second.
        cpu: Microseconds of processor time a record, of all threads.
        cached: Share of the files that was in the page cache before, 0 to 1.
        ratios: Records a second over those of `PLAIN` in the same round.
    """

    way: str
    cache: str
    records: list[float] = field(default_factory=list)
    bytes: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    cached: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Return medians, and the lowest and highest ratio."""
        return {
            "way": self.way,
            "cache": self.cache,
            "records_per_second": round(statistics.median(self.records), 1),
            "bytes_per_second": round(statistics.median(self.bytes)),
            "cpu_us_per_record": round(statistics.median(self.cpu), 2),
            "ratio": round(statistics.median(self.ratios), 3),
            "ratio_range": [round(min(self.ratios), 3), round(max(self.ratios), 3)],
            "cached_before": round(statistics.median(self.cached), 3),
        }


def measure(
    paths: str | Sequence[str],
    *,
    names: Sequence[str] | None = None,
    batch: int = 256,
    rounds: int = 3,
    seconds: float = 0.5,
    check_data: bool = True,
    seed: int = 0,
    progress: Callable[[int], object] | None = None,
) -> list[Row]:
    """Read random batches in every way, in turn.

    Args:
        paths: As for `FileReader`: local files.
        names: The engines; all that work by default.
        batch: Records a batch.
        rounds: How often each way has its turn.
        seconds: Of a turn.
        check_data: Engines compare checksums; the plain loop never does.
        seed: Of the batches, which are the same for all ways of a round.
        progress: Called with 1 after each turn.

    Raises:
        ValueError: There are no records.
        OSError: An engine does not work here, or a file cannot be read.
    """
    if names is None:
        names = [name for name in engines.NAMES if name in engines.probe().engines]
    with contextlib.ExitStack() as stack:
        readers = {
            name: stack.enter_context(FileReader(paths, check_data, engine=name)) for name in names
        }
        any_reader = readers[names[0]]
        if any_reader.n == 0:
            raise ValueError(f"{any_reader!r} has no records to read")
        plain = _PreadLoop(any_reader.fnames)
        stack.callback(plain.close)
        ways: dict[str, Read] = {name: reader.read for name, reader in readers.items()}
        ways[PLAIN] = plain.read
        rows = {(way, cache): Row(way, cache) for cache in ("cold", "hot") for way in ways}
        source = random.Random(seed)
        hot = _hot_part(any_reader, source)
        for turn in range(rounds):
            order = [list(ways)[(turn + place) % len(ways)] for place in range(len(ways))]
            for cache in ("cold", "hot"):
                if cache == "cold":
                    # No record twice: it would be hot the second time.
                    indices = source.sample(range(any_reader.n), min(any_reader.n, _MOST))
                else:
                    indices = source.choices(hot, k=min(_MOST, 50 * len(hot)))
                plain.prepare(indices)
                for way in order:
                    row = rows[way, cache]
                    if cache == "cold":
                        drop(any_reader.fnames)
                        row.cached.append(cached_share(any_reader.fnames, random.Random(turn)))
                    else:
                        plain.read(indices[: len(hot)])
                        row.cached.append(1.0)
                    taken, elapsed = _turn(row, ways[way], indices, batch, seconds)
                    row.bytes.append(plain.size(taken) / elapsed)
                    if progress:
                        progress(1)
                for way in order:
                    records = rows[way, cache].records[-1]
                    rows[way, cache].ratios.append(records / rows[PLAIN, cache].records[-1])
    return list(rows.values())


def drop(paths: Sequence[str]) -> None:
    """Drop files from the page cache; pages that are being written or mapped stay."""
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(paths: Sequence[str], source: random.Random) -> float:
    """Estimate which share of files is in the page cache, by mincore(2).

    Up to 64 windows of 4 MiB are looked at, and nothing is read. The kernel tells the truth to
    those who may write a file, and to others that all of it is there.
    """
    windows = [
        (path, start, min(_WINDOW, os.path.getsize(path) - start))
        for path in paths
        for start in range(0, os.path.getsize(path), _WINDOW)
    ]
    chosen = source.sample(windows, min(_WINDOWS, len(windows)))
    found, pages = 0, 0
    for path, start, length in chosen:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with mmap.mmap(descriptor, length, mmap.MAP_PRIVATE, offset=start) as window:
                resident = _resident(window)
        finally:
            os.close(descriptor)
        found += sum(resident)
        pages += len(resident)
    return found / pages if pages else 0.0


def _resident(window: mmap.mmap) -> list[int]:
    """Return 1 for each page of a mapping that is in memory, else 0."""
    states = (ctypes.c_ubyte * -(-len(window) // mmap.PAGESIZE))()
    first = ctypes.c_char.from_buffer(window)
    try:
        address = ctypes.c_void_p(ctypes.addressof(first))
        library = ctypes.CDLL(None, use_errno=True)
        if library.mincore(address, ctypes.c_size_t(len(window)), states):
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
    finally:
        del first
    return [state & 1 for state in states]


class _PreadLoop:
    """The plain way: it knows where the records of the coming turn lie, and reads one by one."""

    def __init__(self, paths: list[str]) -> None:
        self._paths = paths
        self._files = FileSet(paths, check_data=False, keep_tables=False, most_tables=0)
        self._descriptors: dict[int, int] = {}
        self._places: dict[int, tuple[int, int, int]] = {}

    def prepare(self, indices: Sequence[int]) -> None:
        """Look records up, outside of what is timed."""
        plan = self._files.locate(np.array(indices, np.int64))
        owners, lengths, offsets = (
            array.tolist() for array in (plan.owners, plan.places.lengths, plan.places.offsets)
        )
        places = zip(owners, lengths, offsets, strict=True)
        self._places = dict(zip(indices, places, strict=True))

    def size(self, indices: Iterable[int]) -> int:
        """Return the bytes of records that were looked up."""
        return sum(self._places[index][1] for index in indices)

    def read(self, indices: list[int]) -> object:
        """Read records that were looked up."""
        records = []
        for index in indices:
            owner, length, offset = self._places[index]
            descriptor = self._descriptors.get(owner)
            if descriptor is None:
                descriptor = self._open(owner)
            records.append(os.pread(descriptor, length, offset))
        return records

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()
        for part in self._files.parts:
            part.close()

    def _open(self, owner: int) -> int:
        if len(self._descriptors) >= _MOST_OPEN:
            os.close(self._descriptors.pop(next(iter(self._descriptors))))
        descriptor = os.open(self._paths[owner], os.O_RDONLY | os.O_CLOEXEC)
        self._descriptors[owner] = descriptor
        return descriptor


def _hot_part(reader: FileReader, source: random.Random) -> list[int]:
    """Choose records that fit into the cache together."""
    most = min(_HOT_BYTES, int(engines.available_memory() * _HOT_PART))
    chosen: list[int] = []
    size = 0
    for index in source.sample(range(reader.n), min(reader.n, 100_000)):
        size += reader.nbytes([index])
        if chosen and size > most:
            break
        chosen.append(index)
    return chosen


def _turn(
    row: Row, read: Read, indices: list[int], batch: int, seconds: float
) -> tuple[list[int], float]:
    """Read batches until the time is over; return the indices read and the seconds it took."""
    done = 0
    cpu, start = time.process_time(), time.perf_counter()
    while done < len(indices) and (done == 0 or time.perf_counter() - start < seconds):
        read(indices[done : done + batch])
        done = min(done + batch, len(indices))
    elapsed = time.perf_counter() - start
    row.cpu.append((time.process_time() - cpu) / done * 1e6)
    row.records.append(done / elapsed)
    return indices[:done], elapsed
