"""Files of checkpoints in this machine's file system: written, read, hashed, flushed.

The native part (native/) moves and hashes a segment in one call without the GIL: a piece is hashed
while it is in the cache for its copy. Where it was not built, Python makes the same calls.

- A file that is not in memory has its blocks reserved first, so that a full disk says so at once,
  and the disk begins with each part as soon as it is written, in place of at the flush.
- A file in memory (tmpfs) is made of huge pages where the kernel has that (native/huge.hpp).
- `direct` writes go past the page cache (O_DIRECT) where their memory and place allow that.
- Reads come from the page cache: it is what makes a load right after a save fast, and from a disk
  the kernel's read-ahead is no slower than direct reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfai.checkpoint.storage.base import Failure, File, Run, Sink

native: Any
try:
    from hfai.checkpoint import _transfer as native
except ImportError:  # no Linux, or it was not built
    native = None

_MOST_VIEWS = 1000  # of one preadv or pwritev; Linux takes 1024
_LEAST_RESERVED = 1 << 20  # bytes; smaller files are not worth a call
_HASH = 16  # digits


class LocalSink(Sink):
    """A new file.

    Args:
        path: Where.
        size: Bytes that it will have; 0: not known.
        direct: Write past the page cache what can be.
    """

    def __init__(self, path: Path, size: int = 0, direct: bool = False) -> None:
        self._path = path
        self._direct, self._early = -1, False
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._in_memory = native is not None and native.is_in_memory(self._descriptor)
        if native is None or size < _LEAST_RESERVED or self._in_memory:
            return
        try:
            self._raise(native.reserve(self._descriptor, size))
        except OSError:
            self.abandon()
            raise
        if direct:
            with contextlib.suppress(OSError):  # this file system cannot
                self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        self._early = self._direct < 0

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write at a byte."""
        try:
            for at in range(0, len(views), _MOST_VIEWS):
                offset += _write_all(self._descriptor, views[at : at + _MOST_VIEWS], offset)
        except OSError as error:
            raise named(error, self._path) from None

    def write_hashed(self, offset: int, views: Sequence[memoryview]) -> list[str]:
        """Write at a byte and return each view's hash."""
        if native is None:
            return super().write_hashed(offset, views)
        code, hashes = native.write(
            self._descriptor, self._direct, self._early, self._in_memory, offset, list(views)
        )
        self._raise(code)
        return [hashes[at : at + _HASH] for at in range(0, len(hashes), _HASH)]

    def _raise(self, code: int) -> None:
        if code:
            raise OSError(code, os.strerror(code), str(self._path))

    def close(self) -> None:
        """Make the content last."""
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise named(error, self._path) from None
        self.abandon()

    def abandon(self) -> None:
        """Let go of the file."""
        for descriptor in (self._descriptor, self._direct):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._descriptor = self._direct = -1


class LocalFile(File):
    """A file that is there."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read_runs(self, runs: Sequence[Run], chunk: int) -> Failure | None:
        """Fill runs and compare their hashes."""
        if native is None:
            return super().read_runs(runs, chunk)
        for compared in (True, False):
            numbers = [n for n, run in enumerate(runs) if bool(run.hashes) == compared]
            if not numbers:
                continue
            found = native.read(
                self._descriptor,
                [runs[number].offset for number in numbers],
                [runs[number].view for number in numbers],
                [runs[number].hashes for number in numbers] if compared else [],
                chunk,
            )
            if found is not None:
                at, code, chunk_number, text = found
                return Failure(numbers[at], chunk_number, text, self._error(code))
        return None

    def _error(self, code: int) -> EOFError | OSError | None:
        if code == native.ENDED:
            return EOFError(f"{self._path} ends before")
        return OSError(code, os.strerror(code), str(self._path)) if code else None

    def read_into(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill memory from a byte on."""
        for at in range(0, len(views), _MOST_VIEWS):
            batch = views[at : at + _MOST_VIEWS]
            wanted = sum(map(len, batch))
            done = os.preadv(self._descriptor, batch, offset)
            offset += done
            if done < wanted:
                self._read_on(offset, batch, done)
                offset += wanted - done

    def _read_on(self, offset: int, views: Sequence[memoryview], done: int) -> None:
        """Go on after a short read: one call moves 2 GiB at most, and a signal may cut it."""
        for view in views:
            skipped = min(done, len(view))
            done -= skipped
            while skipped < len(view):
                read = os.preadv(self._descriptor, [view[skipped:]], offset)
                if read == 0:
                    raise EOFError(f"{self._path} ends at byte {offset}")
                skipped += read
                offset += read

    def close(self) -> None:
        """Let go of it."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def flush_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory last, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def named(error: OSError, path: Path) -> OSError:
    """Return the error with the path it was about."""
    return type(error)(error.errno, error.strerror, str(path))


def _write_all(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    total = sum(map(len, views))
    done = os.pwritev(descriptor, views, offset) if total else 0
    if done == total:
        return total
    skip = done
    for view in views:  # a signal or the limit of 2 GiB has cut it short
        start = min(skip, len(view))
        skip -= start
        while start < len(view):
            written = os.pwrite(descriptor, view[start:], offset + done)
            start += written
            done += written
    return total
