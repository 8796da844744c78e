"""Page-locked memory, made by several threads: what a GPU copies to beside everything else.

cudaHostAlloc, which torch uses, finds its pages in one thread: 1.5 GB/s on an H200's host, during
which a first save would hold up its training. Here threads touch ordinary memory in huge pages,
which is then registered with CUDA.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import Any

import torch
from torch import Tensor

from hfai.checkpoint.parallel import in_threads

_PIECE = 16 << 20  # bytes that one thread touches at a time
_MOST_THREADS = 8
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class _Memory(mmap.mmap):
    """Memory that is taken back from CUDA before it is freed."""

    address = 0
    process = 0

    def __del__(self) -> None:
        # A forked child has no such memory, and no CUDA.
        if self.address and self.process == os.getpid():
            with contextlib.suppress(Exception):
                _cudart().cudaHostUnregister(self.address)


def page_locked(size: int) -> Tensor:
    """Return page-locked memory that begins at a page.

    Args:
        size: Bytes.

    Raises:
        MemoryError: There is not so much.
        RuntimeError: CUDA does not lock it.
    """
    try:
        memory = _Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no {size} bytes of host memory for a save's buffers: {error}") from None
    for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # a child would get copies of locked pages
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(getattr(mmap, advice))
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    pieces = whole.split(_PIECE)  # type: ignore[no-untyped-call]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
    in_threads(lambda piece: piece.zero_(), pieces, min(_MOST_THREADS, cores))
    code = int(_cudart().cudaHostRegister(whole.data_ptr(), size, _PORTABLE))
    if code:
        raise RuntimeError(f"CUDA does not lock {size} bytes of host memory: error {code}")
    memory.address, memory.process = whole.data_ptr(), os.getpid()
    return whole


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
