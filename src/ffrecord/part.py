"""One file of a reader: its checked header, and where its records lie.

The tables (12 bytes a record) are loaded when the first record is read, or, where a set is too
large for that, read in small blocks around the records that are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffrecord import extension
from ffrecord import format as ffr
from ffrecord.descriptors import OPEN_FILES, SourceFile
from ffrecord.handle import Handle

if TYPE_CHECKING:
    from typing import TypeAlias

    from ffrecord.store import StoreObject

    Source: TypeAlias = SourceFile | StoreObject

# Records whose table entries are read together: half a KiB of offsets.
_BLOCK = 64


class Places(NamedTuple):
    """Where records lie in their file: offsets, lengths and checksums, one of each a record."""

    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    checksums: NDArray[np.uint32]


class Part:
    """One record file.

    Args:
        file: A local file, by its name too, or an object of a store.
        check_data: Compare the header's checksum.
        keep_tables: Load the tables at the first read and keep them.

    Raises:
        HeaderError: The header makes no sense or is damaged.
        OSError: The file cannot be read.
    """

    def __init__(self, file: Source | str, *, check_data: bool, keep_tables: bool) -> None:
        self.file = SourceFile(file) if isinstance(file, str) else file
        self.keep_tables = keep_tables
        self._keys: extension.KeyIndex | None = None
        self._tables: tuple[NDArray[np.int64], NDArray[np.uint32]] | None = None
        try:
            with self.file.access() as handle:
                self.header = ffr.read_header(handle, self.path, check_data=check_data)
                self.extension = self._find_extension(handle, check_data)
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> str:
        """The file, as it was given."""
        return self.file.path

    def close(self) -> None:
        """Let go of the file; a second call does nothing."""
        if isinstance(self.file, SourceFile):
            OPEN_FILES.forget(self.file)

    def recheck(self) -> None:
        """Read and compare the header again.

        Raises:
            HeaderError: It is damaged now.
        """
        with self.file.access() as handle:
            ffr.read_header(handle, self.path, check_data=True)
            self._find_extension(handle, True)

    def text(self) -> dict[str, Any]:
        """Return the members of the extension block's JSON text; empty where there is no block."""
        if self.extension is None:
            return {}
        with self.file.access() as handle:
            return extension.read_text(handle, self.path, self.extension)

    def keys(self) -> extension.KeyIndex | None:
        """Return the key index, which is kept once it was read; None where there is no block."""
        if self.extension is not None and self._keys is None:
            with self.file.access() as handle:
                n = self.header.n
                self._keys = extension.read_keys(handle, self.path, self.extension, n)
        return self._keys

    def _find_extension(self, handle: Handle, check_data: bool) -> extension.Extension | None:
        begin, end = ffr.tables_end(self.header.n), self.header.start
        return extension.find(handle, self.path, begin, end, check_data=check_data)

    def offsets(self) -> NDArray[np.int64]:
        """Return all offsets and the file's size, shape (n + 1,)."""
        with self.file.access() as handle:
            return ffr.read_offsets(handle, self.path, self.header, 0, self.header.n + 1)

    def checksums(self) -> NDArray[np.uint32]:
        """Return all checksums, shape (n,)."""
        with self.file.access() as handle:
            return ffr.read_checksums(handle, self.path, self.header, 0, self.header.n)

    def locate(self, indices: NDArray[np.int64]) -> Places:
        """Look up records by their index in this file, which must be in range."""
        if not self.keep_tables:
            return self._look_up(indices)
        offsets, checksums = self._tables or self._load()
        starts = offsets[indices]
        return Places(starts, offsets[indices + 1] - starts, checksums[indices])

    def locate_one(self, index: int) -> tuple[int, int, int]:
        """Look up one record: its offset, its length and its checksum."""
        if self.keep_tables:
            offsets, checksums = self._tables or self._load()
            start = int(offsets[index])
            return start, int(offsets[index + 1]) - start, int(checksums[index])
        with self.file.access() as handle:
            ends = ffr.read_offsets(handle, self.path, self.header, index, index + 2)
            checksums = ffr.read_checksums(handle, self.path, self.header, index, index + 1)
        return int(ends[0]), int(ends[1] - ends[0]), int(checksums[0])

    def _load(self) -> tuple[NDArray[np.int64], NDArray[np.uint32]]:
        self._tables = self.offsets(), self.checksums()
        return self._tables

    def _look_up(self, indices: NDArray[np.int64]) -> Places:
        count = len(indices)
        places = Places(
            np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.uint32)
        )
        if not count:
            return places
        order = np.argsort(indices, kind="stable")
        blocks = indices[order] // _BLOCK
        with self.file.access() as handle:
            for members in np.split(order, np.flatnonzero(np.diff(blocks)) + 1):
                first = int(indices[members[0]]) // _BLOCK * _BLOCK
                last = min(first + _BLOCK, self.header.n)
                offsets = ffr.read_offsets(handle, self.path, self.header, first, last + 1)
                checksums = ffr.read_checksums(handle, self.path, self.header, first, last)
                inside = indices[members] - first
                places.offsets[members] = offsets[inside]
                places.lengths[members] = offsets[inside + 1] - offsets[inside]
                places.checksums[members] = checksums[inside]
        return places
