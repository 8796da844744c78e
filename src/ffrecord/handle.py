"""What headers and tables are read from: an open file's descriptor, or an object of a store.

Both answer reads by position, so that a handle may be shared by threads.
"""

from __future__ import annotations

import os
import stat
from typing import Protocol


class RandomAccess(Protocol):
    """Bytes that are not a local file."""

    @property
    def size(self) -> int:
        """The number of bytes."""

    def pread(self, length: int, offset: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer only at the end.

        Raises:
            OSError: They cannot be read.
        """


Handle = int | RandomAccess


def pread(handle: Handle, length: int, offset: int) -> bytes:
    """Return `length` bytes from `offset` on; of a local file there may be fewer."""
    if isinstance(handle, int):
        return os.pread(handle, length, offset)
    return handle.pread(length, offset)


def size_of(handle: Handle) -> int | None:
    """Return the number of bytes, or None for what is not a regular file."""
    if not isinstance(handle, int):
        return handle.size
    status = os.fstat(handle)
    return status.st_size if stat.S_ISREG(status.st_mode) else None
