"""The one interface behind the reader: a batch of pieces of files, read into one arena.

An implementation lives in a file of its own and passes tests/ffrecord/test_engines.py. This file
holds the one that needs nothing but Python: requests sorted, neighbours in a file read by one
`preadv` straight into their places.
"""

from __future__ import annotations

import os
import zlib
from abc import ABC, abstractmethod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Requests(NamedTuple):
    """What a batch wants, one item of each array a request.

    Attributes:
        keys: Which source: for local files an open descriptor.
        offsets: The first byte in the source.
        lengths: How many bytes; 0 is allowed.
        positions: Where in the arena they go; places do not overlap.
    """

    keys: NDArray[np.int64]
    offsets: NDArray[np.int64]
    lengths: NDArray[np.int64]
    positions: NDArray[np.int64]


class RequestError(OSError):
    """A request that could not be served whole.

    Attributes:
        request: Its index in the batch.
    """

    def __init__(self, code: int, message: str, request: int) -> None:
        super().__init__(code, message)
        self.request = request


class ShortReadError(RequestError):
    """A source that ended before the request did."""


class Engine(ABC):
    """A way to read batches."""

    name: str

    def empty(self, size: int) -> NDArray[np.uint8]:
        """Return memory for a batch: an array of `size` bytes, shape (size,), content undefined."""
        return np.empty(size, np.uint8)

    @abstractmethod
    def read_batch(
        self, requests: Requests, arena: NDArray[np.uint8], *, checksums: bool
    ) -> NDArray[np.uint32] | None:
        """Read every request into its place in the arena.

        Args:
            requests: What to read; in any order, duplicates and overlaps in the source allowed.
            arena: Contiguous and writable. Bytes between the places may be overwritten.
            checksums: Also return the CRC-32 of every request's bytes, in the order of requests.

        Raises:
            ShortReadError: A source ended early.
            RequestError: A source could not be read.
        """


# The kernel takes no more buffers than this in one call (IOV_MAX on Linux).
_MOST_BUFFERS = 1024


class PythonEngine(Engine):
    """Sorted, merged `preadv` calls from the calling thread."""

    name = "python"

    def read_batch(
        self, requests: Requests, arena: NDArray[np.uint8], *, checksums: bool
    ) -> NDArray[np.uint32] | None:
        """Read the requests one run of neighbours after the other."""
        keys, offsets, lengths, positions = (column.tolist() for column in requests)
        memory = arena.data
        views = [
            memory[position : position + length]
            for position, length in zip(positions, lengths, strict=True)
        ]
        run: list[int] = []
        following = (-1, -1)
        for request in np.lexsort((requests.offsets, requests.keys)).tolist():
            if not lengths[request]:
                continue
            if (keys[request], offsets[request]) != following or len(run) == _MOST_BUFFERS:
                self._read_run(keys, offsets, views, run)
                run = []
            run.append(request)
            following = (keys[request], offsets[request] + lengths[request])
        self._read_run(keys, offsets, views, run)
        if not checksums:
            return None
        return np.fromiter((zlib.crc32(view) for view in views), np.uint32, len(views))

    @staticmethod
    def _read_run(
        keys: list[int], offsets: list[int], views: list[memoryview], run: list[int]
    ) -> None:
        """Read requests that follow each other in one source."""
        if not run:
            return
        at = offsets[run[0]]
        buffers = [views[request] for request in run]
        done = 0
        while done < len(run):
            try:
                got = os.preadv(keys[run[0]], buffers[done:], at)
            except OSError as error:
                raise RequestError(
                    error.errno or 0, os.strerror(error.errno or 0), run[done]
                ) from None
            if got == 0:
                raise ShortReadError(0, f"the source ends at byte {at}", run[done])
            at += got
            while done < len(run) and got >= len(buffers[done]):
                got -= len(buffers[done])
                done += 1
            if got:
                buffers[done] = buffers[done][got:]
