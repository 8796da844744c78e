"""The original's way to read a batch, as a baseline: Linux AIO on an ordinary descriptor.

One request a record, all submitted at once, each record into memory of its own, its CRC-32 by zlib.
The requests are filled in as columns of a numpy array, so that Python's cost is a small part.
"""

from __future__ import annotations

import ctypes
import os
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ffrecord import FileReader

# struct iocb and struct io_event of linux/aio_abi.h, little-endian.
_REQUEST = np.dtype(
    {
        "names": ["data", "opcode", "descriptor", "address", "length", "offset"],
        "formats": ["<u8", "<u2", "<u4", "<u8", "<u8", "<i8"],
        "offsets": [0, 16, 20, 24, 32, 40],
        "itemsize": 64,
    }
)
_EVENT = np.dtype([("data", "<u8"), ("request", "<u8"), ("result", "<i8"), ("more", "<i8")])
_SETUP, _DESTROY, _GET_EVENTS, _SUBMIT = 206, 207, 208, 209  # on x86-64
_MOST = 4096

_system = ctypes.CDLL(None, use_errno=True).syscall
_system.restype = ctypes.c_long


def _call(number: int, *arguments: int) -> int:
    result: int = _system(ctypes.c_long(number), *(ctypes.c_long(value) for value in arguments))
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


class Context:
    """A context of Linux AIO.

    Args:
        most: Reads that may wait at a time.

    Attributes:
        waiting: Reads that were submitted and not waited for.
    """

    def __init__(self, most: int) -> None:
        context = ctypes.c_ulong()
        _call(_SETUP, most, ctypes.addressof(context))
        self._context = context.value
        self._events = np.zeros(most, _EVENT)
        self.waiting = 0

    def submit(
        self,
        descriptor: int,
        addresses: NDArray[np.int64],
        lengths: NDArray[np.int64],
        offsets: NDArray[np.int64],
    ) -> None:
        """Start reads."""
        requests = np.zeros(len(addresses), _REQUEST)
        requests["descriptor"] = descriptor
        requests["address"] = addresses
        requests["length"] = lengths
        requests["offset"] = offsets
        pointers = requests.ctypes.data + _REQUEST.itemsize * np.arange(len(addresses))
        submitted = 0
        while submitted < len(addresses):
            rest = pointers[submitted:]
            submitted += _call(_SUBMIT, self._context, len(rest), rest.ctypes.data)
        self.waiting += submitted

    def wait(self, least: int) -> None:
        """Wait until at least so many of the reads have ended.

        Raises:
            OSError: One failed.
        """
        done = 0
        while done < least:
            at = self._events.ctypes.data
            got = _call(_GET_EVENTS, self._context, 1, self.waiting, at, 0)
            worst = int(self._events["result"][:got].min())
            if worst < 0:
                raise OSError(-worst, os.strerror(-worst))
            done += got
            self.waiting -= got

    def close(self) -> None:
        """End the context."""
        _call(_DESTROY, self._context)


class LibaioReader:
    """Reads batches of one record file.

    Args:
        path: The file.
        check_data: Compare checksums.
    """

    def __init__(self, path: Path, check_data: bool) -> None:
        with FileReader(path) as reader:
            self._offsets, self._checksums = reader.get_offsets(0), reader.get_checksums(0).tolist()
        self._check = check_data
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._context = Context(_MOST)

    def read(self, indices: list[int]) -> list[NDArray[np.uint8]]:
        """Read a batch of at most 4096 records."""
        wanted = np.array(indices)
        lengths = self._offsets[wanted + 1] - self._offsets[wanted]
        records = [np.empty(length, np.uint8) for length in lengths.tolist()]
        addresses = np.array([record.ctypes.data for record in records], np.int64)
        self._context.submit(self._descriptor, addresses, lengths, self._offsets[wanted])
        self._context.wait(len(indices))
        if self._check:
            for index, record in zip(indices, records, strict=True):
                if zlib.crc32(record.data) != self._checksums[index]:
                    raise RuntimeError(f"record {index} is damaged")
        return records

    def close(self) -> None:
        """Let go of the file."""
        self._context.close()
        os.close(self._descriptor)
