"""Page-locked memory, what a GPU copies to beside everything else, made without the GIL.

cudaHostAlloc, which torch uses, finds its pages in one thread: 1.5 GB/s on an H200's host. Here
ordinary memory in huge pages is touched first, by any thread and beside CUDA's other calls, and
then registered, which is short.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import mmap
import os
from typing import Any

import torch
from torch import Tensor

# Of Linux's <linux/mman.h>; Python has no names for them.
_WIPE_ON_FORK = 18
_POPULATE_WRITE = 23  # since 5.14
_THREAD_LOCAL = 1  # cudaStreamCaptureModeThreadLocal
_PORTABLE = 1  # cudaHostRegisterPortable: for all devices


class _Memory(mmap.mmap):
    """Memory that is taken back from CUDA before it is freed."""

    address = 0
    process = 0

    def __del__(self) -> None:
        # A forked child has no CUDA.
        if self.address and self.process == os.getpid():
            with contextlib.suppress(Exception):
                _cudart().cudaHostUnregister(self.address)


def page_locked(size: int, device: torch.device) -> Tensor:
    """Return page-locked memory that begins at a page.

    If CUDA refuses, that stays the calling thread's last error, where torch may find it behind
    another call: give it a thread of its own.

    Args:
        size: Bytes.
        device: Whose context is there already; all devices may copy to the memory.

    Raises:
        MemoryError: There is not so much.
        RuntimeError: CUDA does not lock it.
    """
    memory, whole = _touched(size)
    lock(whole, device)
    memory.address, memory.process = whole.data_ptr(), os.getpid()
    return whole


def lock(memory: Tensor, device: torch.device) -> None:
    """Let CUDA lock memory; see `page_locked`.

    Raises:
        RuntimeError: It does not.
    """
    with torch.cuda.device(device):
        code = _cudart().cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
        if int(code):
            reason = _cudart().cudaGetErrorString(code)
            raise RuntimeError(f"CUDA does not lock {memory.nbytes} bytes: {reason} ({int(code)})")


def spare_captures() -> None:
    """Let this thread's calls leave CUDA graphs alone that another thread is capturing.

    By default such a call fails, and the capture with it. torch has no name for this.
    """
    major = (torch.version.cuda or "").partition(".")[0]
    with contextlib.suppress(OSError, AttributeError):  # no such library, or an old one
        library = ctypes.CDLL(f"libcudart.so.{major}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        mode = ctypes.c_int(_THREAD_LOCAL)
        library.cudaThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def touched(size: int) -> Tensor:
    """Return zeros of which every page is there, the first at a page's begin.

    A forked child sees zeros, and shares or copies none of it.

    Raises:
        MemoryError: There is not so much.
    """
    return _touched(size)[1]


def _touched(size: int) -> tuple[_Memory, Tensor]:
    try:
        memory = _Memory(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"there are no {size} bytes of host memory: {error.strerror}") from None
    for advice in (getattr(mmap, "MADV_HUGEPAGE", None), _WIPE_ON_FORK):
        with contextlib.suppress(OSError):  # a kernel without it
            if advice is not None:
                memory.madvise(advice)
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    # By ctypes, which lets go of the GIL; mmap's own madvise does not, and takes 5 ms for 32 MiB.
    library = ctypes.CDLL(None, use_errno=True)
    address = ctypes.c_void_p(whole.data_ptr())
    if library.madvise(address, ctypes.c_size_t(size), _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code not in (errno.EINVAL, errno.ENOSYS):
            raise MemoryError(f"there are no {size} bytes of host memory: {os.strerror(code)}")
        ctypes.memset(address, 0, size)
    return memory, whole


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
