"""The native engines: one call for a batch, without the GIL, checksums included.

What lies in the page cache is read at once. The rest waits for the disk together: in a ring of
io_uring, or where there is none, in short-lived threads. See src/ffrecord/native.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from ffrecord._native import probe_ring as native_probe
from ffrecord._native import read_batch as native_read
from ffrecord.engine import Engine, RequestError, Requests, ShortReadError

_NO_CHECKSUMS = np.empty(0, np.uint32)


class ThreadsEngine(Engine):
    """Blocking reads in threads that live for one batch, for what is not in the page cache."""

    name = "threads"
    _ring = False
    _direct = False

    def read_batch(
        self, requests: Requests, arena: NDArray[np.uint8], *, checksums: bool
    ) -> NDArray[np.uint32] | None:
        """Read the requests in one native call."""
        found = np.empty(len(requests.keys), np.uint32) if checksums else _NO_CHECKSUMS
        failed, code = native_read(*requests, arena, found, checksums, self._ring, self._direct)
        if failed >= 0 and code:
            raise RequestError(code, os.strerror(code), failed)
        if failed >= 0:
            raise ShortReadError(0, "the source ends before the request", failed)
        return found if checksums else None


class RingEngine(ThreadsEngine):
    """io_uring for what is not in the page cache; threads in a process where it fails."""

    name = "io_uring"
    _ring = True


class DirectEngine(RingEngine):
    """io_uring past the page cache (O_DIRECT), for sets that memory cannot hold."""

    name = "direct"
    _direct = True


def probe_ring() -> str | None:
    """Read through an io_uring, and return why that does not work, or None."""
    descriptor = os.open("/proc/self/exe", os.O_RDONLY | os.O_CLOEXEC)
    try:
        code = native_probe(descriptor)
    finally:
        os.close(descriptor)
    return os.strerror(code) if code else None
