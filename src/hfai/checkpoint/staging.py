"""Memory of the host that saves copy through: a bounded number of buffers, used again and again.

A save that finds no free buffer waits until one is written: a state larger than the budget takes
longer to stage, and never more memory.

Buffers for copies from a GPU are page-locked, which takes about 0.1 s a GB and would hold up the
training at its first save. So they can be prepared: one thread makes one after the other, and rests
as long as each has taken, since CUDA's other calls wait while it locks memory. As soon as a save
needs buffers, more threads help, and none rests.
"""

from __future__ import annotations

import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from hfai.checkpoint.page_locked import page_locked, spare_captures
from hfai.checkpoint.shard import SEGMENT

HOST_BUDGET = 4 << 30  # bytes of buffers in each rank, where nothing else is said
_ALIGNMENT = 4096
_MOST_MAKERS = 8
# Makes a page-locked buffer.
Make = Callable[[], Tensor]


class HostPool:
    """Buffers of SEGMENT bytes.

    Args:
        budget: Bytes of all buffers together; at least two buffers are allowed.

    Raises:
        ValueError: The budget is less.
    """

    def __init__(self, budget: int) -> None:
        least = 2 * SEGMENT
        if budget < least:
            raise ValueError(f"host_budget is {budget}: give at least {least} bytes, two buffers")
        self._budget = budget // SEGMENT
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._process = os.getpid()
        self._changed = threading.Condition()
        self._most = self._budget
        self._free: list[Tensor] = []
        self._made = 0  # also those that are being made
        self._make: Make | None = None  # None: buffers are ordinary memory
        self._wanted = 0  # how many page-locked buffers threads make
        self._refused = False  # memory could not be locked
        self._makers = 0  # threads
        self._hurried = False

    def _own(self) -> None:
        """Have no buffers in a forked child: memory, threads and perhaps the lock are gone."""
        if self._process != os.getpid():
            self._begin_anew()

    @property
    def allocated(self) -> int:
        """Bytes of the buffers that exist."""
        self._own()
        return self._made * SEGMENT

    def prepare(self, size: int, device: torch.device | str = "cuda") -> None:
        """Begin to make page-locked buffers, in a thread that leaves the training its time.

        If memory cannot be locked, a warning says so and ordinary memory takes its place.

        Args:
            size: Bytes that a save copies from this process's GPUs; above the budget, that counts.
            device: One of them; "cuda" is the calling thread's.
        """
        place = torch.device(device)
        if place.index is None and torch.cuda.is_available():
            place = torch.device("cuda", torch.cuda.current_device())
        self.expect(-(-size // SEGMENT), locking(place), hurried=False)

    def wait_prepared(self, timeout: float | None = None) -> bool:
        """Wait until no buffer is being made; return whether that is so.

        Args:
            timeout: Seconds; None: as long as it takes.
        """
        self._own()
        with self._changed:
            return self._changed.wait_for(lambda: not self._makers, timeout)

    def expect(self, count: int, make: Make, hurried: bool = True) -> None:
        """Let threads make page-locked buffers.

        Args:
            count: How many there are to be; above the budget, that counts.
            make: Makes one.
            hurried: Whether a save waits for them.
        """
        self._own()
        with self._changed:
            if self._refused:
                return
            if self._make is None:
                self._make = make
                self._made -= len(self._free)
                self._free.clear()
            self._wanted = max(self._wanted, min(count, self._most))
            self._start(hurried)

    def _start(self, hurried: bool) -> None:
        self._hurried = hurried or (self._hurried and self._makers > 0)
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        most = min(_MOST_MAKERS, cores) if self._hurried else 1
        while self._makers < min(most, self._wanted - self._made):
            # No daemon, which would be stopped in the midst of a call to CUDA.
            maker = threading.Thread(
                target=_make_buffers, args=(weakref.ref(self),), name="hfai-checkpoint-buffers"
            )
            try:
                maker.start()
            except RuntimeError as error:  # there are too many threads
                if not self._makers:
                    self._lock_no_more(error)
                return
            self._makers += 1

    def _make_one(self) -> float | None:
        """Make one buffer; return how long to rest, None at the end."""
        began = time.perf_counter()
        with self._changed:
            # At the script's end only a save that still runs needs buffers.
            ended = not self._hurried and not threading.main_thread().is_alive()
            make = self._make
            if ended or make is None or self._made >= self._wanted:
                self._makers -= 1
                self._changed.notify_all()
                return None
            self._made += 1
        try:
            buffer = make()
        except Exception as error:
            with self._changed:
                self._made -= 1
                self._makers -= 1
                self._lock_no_more(error)
                self._changed.notify_all()
            return None
        with self._changed:
            if self._made > self._wanted:  # it was trimmed meanwhile
                self._made -= 1
            else:
                self._free.append(buffer)
            self._changed.notify_all()
            return 0.0 if self._hurried else time.perf_counter() - began

    def _lock_no_more(self, error: Exception) -> None:
        if self._refused:
            return
        self._make, self._refused = None, True
        warnings.warn(
            f"buffers of asynchronous saves are not page-locked beyond {self._made * SEGMENT} "
            f"bytes, and a save stops the training for longer ({error}): lower host_budget or "
            "raise the process's limit of memory",
            stacklevel=2,
        )

    def acquire(self, failed: Callable[[], bool] = lambda: False) -> Tensor | None:
        """Return a free buffer, as soon as there is one; None if `failed` turns true before.

        Raises:
            MemoryError: There is no memory for a single one.
        """
        self._own()
        while True:
            with self._changed:
                if failed():
                    return None
                if self._free:
                    return self._free.pop()
                if self._made < self._most and self._make is not None:
                    if not self._makers:
                        self._wanted = max(self._wanted, self._made + 1)
                    self._start(hurried=True)
                if self._made >= self._most or self._make is not None:
                    self._changed.wait(0.1)
                    continue
                self._made += 1
            try:
                return _ordinary()
            except (MemoryError, RuntimeError) as error:  # the latter is torch's
                with self._changed:
                    self._made -= 1
                    if not self._made:
                        raise MemoryError(
                            f"no {SEGMENT} bytes of host memory for a save's buffer: {error}"
                        ) from None
                    self._most = self._made  # the save goes on with what there is

    def release(self, buffer: Tensor) -> None:
        """Give a buffer back."""
        with self._changed:
            self._free.append(buffer)
            self._changed.notify()

    def trim(self) -> None:
        """Free the memory of buffers that nobody uses, and make no more ahead."""
        self._own()
        with self._changed:
            self._wanted, self._most, self._refused = 0, self._budget, False
            self._made -= len(self._free)
            self._free.clear()


def _make_buffers(reference: weakref.ref[HostPool]) -> None:
    """Make a pool's buffers, as long as somebody has it and it wants more."""
    spare_captures()
    while True:
        pool = reference()
        rest = None if pool is None else pool._make_one()
        del pool
        if rest is None:
            return
        time.sleep(rest)


def locking(device: torch.device) -> Make:
    """Return what makes a page-locked buffer, in a process that uses this GPU."""
    return lambda: page_locked(SEGMENT, device)


def _ordinary() -> Tensor:
    """Return a buffer that begins at a page, as direct I/O asks for."""
    memory = torch.empty(SEGMENT + _ALIGNMENT, dtype=torch.uint8)
    skip = -memory.data_ptr() % _ALIGNMENT
    return memory[skip : skip + SEGMENT]
