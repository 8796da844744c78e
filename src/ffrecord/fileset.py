"""Several files as one run of records: which file an index lies in, and where."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffrecord import format as ffr
from ffrecord.descriptors import OPEN_FILES, SourceFile
from ffrecord.part import Part, Places
from ffrecord.store_options import StoreOptions, is_url

if TYPE_CHECKING:
    from ffrecord.store import StoreObject

# A batch that touches more files than this is read in several goes, so that the number of open
# files stays bounded whatever the set.
_MOST_FILES = 64
# Objects of a store that are opened side by side.
_MOST_OPENING = 16
# Bytes and records of one piece when all of a set is read in order.
_SCAN_BYTES = 8 << 20
_SCAN_RECORDS = 1024


class Plan(NamedTuple):
    """Where the records of a batch lie.

    Attributes:
        owners: The number of each record's file, shape (count,).
        places: Their places in those files.
    """

    owners: NDArray[np.int64]
    places: Places


class FileSet:
    """Record files in order.

    Args:
        paths: The files, or the URLs of objects.
        storage: How objects are read.
        check_data: Compare the headers' checksums.
        keep_tables: Keep tables in memory; None: where they take no more than `most_tables` bytes.
        most_tables: See `keep_tables`.

    Raises:
        HeaderError: A file is damaged, cut short, or no record file.
        OSError: A file cannot be read.
    """

    def __init__(
        self,
        paths: list[str],
        *,
        storage: StoreOptions | None = None,
        check_data: bool,
        keep_tables: bool | None,
        most_tables: int,
    ) -> None:
        self.is_remote = is_url(paths[0])

        def open_part(path: str) -> Part:
            source = (
                _object(path, storage or StoreOptions()) if self.is_remote else SourceFile(path)
            )
            return Part(source, check_data=check_data, keep_tables=keep_tables is not False)

        if self.is_remote and len(paths) > 1:
            # Each waits for the store a few times before it is open.
            with ThreadPoolExecutor(min(len(paths), _MOST_OPENING)) as pool:
                self.parts = list(pool.map(open_part, paths))
        else:
            self.parts = []
            try:
                for path in paths:
                    self.parts.append(open_part(path))
            except BaseException:
                for part in self.parts:
                    part.close()
                raise
        # ends[k]: the index after the last record of part k.
        self.ends = list(accumulate(part.header.n for part in self.parts))
        self._ends = np.array(self.ends, np.int64)
        self.n = self.ends[-1]
        # A lookup in a store would wait for it once or twice a record.
        if keep_tables is None and not self.is_remote and self.n * ffr.ENTRY > most_tables:
            for part in self.parts:
                part.keep_tables = False

    def find(self, index: int) -> tuple[Part, int]:
        """Return the file that holds a record, and the record's index in it."""
        number = bisect_right(self.ends, index)
        part = self.parts[number]
        return part, index - (self.ends[number] - part.header.n)

    def locate(self, indices: NDArray[np.int64]) -> Plan:
        """Look up records, which must be in range."""
        if len(self.parts) == 1:
            return Plan(np.zeros(len(indices), np.int64), self.parts[0].locate(indices))
        count = len(indices)
        owners = np.searchsorted(self._ends, indices, side="right")
        places = Places(
            np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint32)
        )
        order = np.argsort(owners, kind="stable")
        for members in np.split(order, np.flatnonzero(np.diff(owners[order])) + 1):
            if not len(members):
                continue
            number = int(owners[members[0]])
            part = self.parts[number]
            found = part.locate(indices[members] - (self.ends[number] - part.header.n))
            places.offsets[members] = found.offsets
            places.lengths[members] = found.lengths
            places.checksums[members] = found.checksums
        return Plan(owners, places)

    def goes(self, owners: NDArray[np.int64]) -> Iterator[tuple[list[int], NDArray[np.int64]]]:
        """Split a batch so that no piece touches too many files.

        Yields:
            The numbers of the files, sorted, and which items of the batch lie in them.
        """
        numbers = np.unique(owners)
        if len(numbers) <= _MOST_FILES:
            if len(numbers):
                yield numbers.tolist(), np.arange(len(owners))
            return
        for first in range(0, len(numbers), _MOST_FILES):
            chosen = numbers[first : first + _MOST_FILES]
            yield chosen.tolist(), np.flatnonzero(np.isin(owners, chosen))

    @contextmanager
    def keys(self, numbers: list[int]) -> Iterator[list[int]]:
        """Give the keys by which an engine knows files, which stay open until the block is left."""
        sources = [self.parts[number].file for number in numbers]
        local = [source for source in sources if isinstance(source, SourceFile)]
        if len(local) < len(sources):
            yield [source.number for source in sources]
        else:
            with OPEN_FILES.lease(*local) as descriptors:
                yield descriptors

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges of neighbouring records, each a good piece of work (8 MiB or one record)."""
        for part, end in zip(self.parts, self.ends, strict=True):
            base = end - part.header.n
            for start in range(0, part.header.n, _SCAN_RECORDS):
                stop = min(start + _SCAN_RECORDS, part.header.n)
                lengths = part.locate(np.arange(start, stop)).lengths.tolist()
                first, size = start, 0
                for index, length in enumerate(lengths, start):
                    if size and size + length > _SCAN_BYTES:
                        yield base + first, base + index
                        first, size = index, 0
                    size += length
                yield base + first, base + stop


def _object(url: str, options: StoreOptions) -> StoreObject:
    """Return an object of a store; local files do not need what that loads."""
    from ffrecord.store import StoreObject

    return StoreObject(url, options)
