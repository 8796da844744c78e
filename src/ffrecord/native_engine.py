"""The native engines: one call for a batch, without the GIL, checksums included.

What lies in the page cache is read at once, by a second thread too where a batch is large and a
core is free. The rest waits for the disk together: in a queue of the kernel's (io_uring or Linux
AIO), or where there is none, in short-lived threads. See src/ffrecord/native.
"""

from __future__ import annotations

import os
import sys

import numpy as np
from numpy.typing import NDArray

from ffrecord import _native
from ffrecord.engine import Engine, RequestError, Requests, ShortReadError

_NO_CHECKSUMS = np.empty(0, np.uint32)

# Copying from the page cache is bound by the memory's bandwidth, which few threads exhaust.
_MOST_COPYING = 4


class NativeEngine(Engine):
    """A way to wait for the disk.

    Args:
        name: What users call it.
        way: "io_uring", "libaio" or "threads".
        direct: Read past the page cache (O_DIRECT) what is not in it.
        cached_first: Take from the page cache what is there.
    """

    def __init__(self, name: str, way: str, *, direct: bool, cached_first: bool) -> None:
        self.name = name
        self._way = way
        self._direct = direct
        self._cached_first = cached_first

    def empty(self, size: int) -> NDArray[np.uint8]:
        """Return memory for a batch; that of earlier batches where nothing refers to it."""
        return np.empty(size, np.uint8) if size < _native.LEAST_ARENA else _native.empty(size)

    def read_batch(
        self, requests: Requests, arena: NDArray[np.uint8], *, checksums: bool
    ) -> NDArray[np.uint32] | None:
        """Read the requests in one native call."""
        found = np.empty(len(requests.keys), np.uint32) if checksums else _NO_CHECKSUMS
        failed, code = _native.read_batch(
            *requests,
            arena,
            found,
            checksums,
            self._way,
            self._direct,
            self._cached_first,
            copying_threads(),
        )
        if failed >= 0 and code:
            raise RequestError(code, os.strerror(code), failed)
        if failed >= 0:
            raise ShortReadError(0, "the source ends before the request", failed)
        return found if checksums else None


def copying_threads() -> int:
    """Return how many threads may copy one batch from the page cache.

    One in a child of `multiprocessing`: a loader's workers have siblings for the other cores.
    """
    processes = sys.modules.get("multiprocessing.process")
    if processes is not None and processes.parent_process() is not None:
        return 1
    return min(_MOST_COPYING, len(os.sched_getaffinity(0)))


def probe(way: str) -> str | None:
    """Read a byte that way, and return why it does not work, or None."""
    descriptor = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
    try:
        code = _native.probe(way, descriptor)
    finally:
        os.close(descriptor)
    return os.strerror(code) if code else None
