"""Memory of the host that saves copy through: a bounded number of buffers, used again and again.

A save that finds no free buffer waits until one is written: a state larger than the budget takes
longer to stage, and never more memory.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

import torch
from torch import Tensor

from hfai.checkpoint.page_locked import page_locked
from hfai.checkpoint.shard import SEGMENT

_ALIGNMENT = 4096
_MOST_MADE = 32  # buffers that are made at a time


class HostPool:
    """Buffers of SEGMENT bytes.

    Args:
        budget: Bytes of all buffers together; at least two buffers are allowed.

    Attributes:
        allocated: Bytes of the buffers that exist.
    """

    def __init__(self, budget: int) -> None:
        least = 2 * SEGMENT
        if budget < least:
            raise ValueError(f"host_budget is {budget}: give at least {least} bytes, two buffers")
        self._most = budget // SEGMENT
        self._pinned = False
        self._free: list[Tensor] = []
        self._made = 0
        self._changed = threading.Condition()

    def pin(self, wanted: bool) -> None:
        """Make buffers page-locked from now on: to them a GPU copies beside everything else."""
        with self._changed:
            if wanted and not self._pinned:
                self._pinned = True
                self._made -= len(self._free)
                self._free.clear()

    @property
    def allocated(self) -> int:
        """Bytes of the buffers that exist."""
        return self._made * SEGMENT

    def acquire(self, failed: Callable[[], bool] = lambda: False) -> Tensor | None:
        """Return a free buffer, as soon as there is one; None if `failed` turns true before."""
        with self._changed:
            while not self._free and self._made >= self._most:
                if failed():
                    return None
                self._changed.wait(0.1)
            if failed():
                return None
            if self._free:
                return self._free.pop()
            # Page-locked memory is made faster in large pieces: each time as much as there is.
            most = min(max(self._made, 1), _MOST_MADE) if self._pinned else 1
            count = min(most, self._most - self._made)
            self._made += count
            pinned = self._pinned
        try:
            first, *others = _allocate(count, pinned)
        except BaseException:
            with self._changed:
                self._made -= count
            raise
        with self._changed:
            self._free += others
            self._changed.notify_all()
        return first

    def release(self, buffer: Tensor) -> None:
        """Give a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def trim(self) -> None:
        """Free the memory of buffers that nobody uses."""
        with self._changed:
            self._made -= len(self._free)
            self._free.clear()


def _allocate(count: int, pinned: bool) -> list[Tensor]:
    """Return buffers that begin at a page, as direct I/O asks for."""
    if pinned:
        with contextlib.suppress(RuntimeError):
            memory = page_locked(count * SEGMENT)
            return [memory[at : at + SEGMENT] for at in range(0, len(memory), SEGMENT)]
    found = []
    for _ in range(count):
        memory = torch.empty(SEGMENT + _ALIGNMENT, dtype=torch.uint8, pin_memory=pinned)
        skip = -memory.data_ptr() % _ALIGNMENT
        found.append(memory[skip : skip + SEGMENT])
    return found
