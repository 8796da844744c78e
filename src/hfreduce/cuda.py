"""All-reduces of tensors on GPUs: copy engines move, the CPU adds, no kernel runs.

Each rank pins the group's memory and copies its tensor into it chunk by chunk; the CPU adds, as for
tensors of the CPU; the sum is copied back. The copies wait for words in pinned memory that the CPU
writes, so a call returns when they are enqueued and later work of the caller's stream waits on the
GPU, not on the host. See native/cuda_path.hpp.

A rank that fails leaves the others' tensors of that call undefined: their streams are let go, and
their next call raises, as does `wait` of a handle whose call has failed by then.

A call keeps its tensor until the host has seen the last copy end, so torch's allocator need not be
told of the two streams (`record_stream`), where later calls' waits would hold up what it frees.
"""

from __future__ import annotations

import threading
from collections import deque
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfreduce import dtypes, outcome, segment, topology
from hfreduce.errors import UnavailableError
from hfreduce.exchange import Exchange
from hfreduce.worker import Worker

if TYPE_CHECKING:
    from hfreduce._engine import CudaPath, Group

# Large enough that a copy runs at the link's speed, small enough that a rank's slots stay few: on
# an H200 one rank copied 1 GiB out and back at 27 GiB/s in chunks of 1 MiB, at 38 in chunks of 4,
# at 42 of 8, at 45 of 32.
# Chunks and slots: of six settings the fastest for 186 MiB on two H200s with 16 cores a rank.
# Threads: there 8 gave 30.6 and 40.5 GiB/s at 25 and 186 MiB in one trial, 6 gave 27.2 and 26.7.
CHUNK_BYTES = 8 << 20
SLOTS = 8
MOST_THREADS = 8
# From how many bytes on another thread enqueues a call that is made for that (DDP's hook): its 50
# calls of the driver and the threads that it wakes take some 250 µs, in which a backward pass would
# launch none of its kernels.
APART_BYTES = 1 << 20
_WRAP = 1 << 32
# What a chunk passes, in order; the engine's numbers (native/trace.hpp).
STAGES = ("allowed", "arrived", "gathered", "adding", "added", "combined", "gone", "returned")


class CudaHandle:
    """An all-reduce under way on a GPU."""

    def __init__(
        self,
        future: Future[None] | None,
        done: torch.cuda.Event | None,
        stream: torch.cuda.Stream,
        enqueued: Future[None] | None = None,
    ) -> None:
        self._future, self._done, self._stream = future, done, stream
        self._enqueued = enqueued

    def done(self) -> bool:
        """Say whether the call has ended, well or not."""
        return self._future is None or self._future.done()

    def exception(self) -> BaseException | None:
        """Return what the call raised; None while it is under way, and where it ended well."""
        return self._future.exception() if self._future and self._future.done() else None

    def wait(self, timeout: float | None = None) -> None:
        """Make the current stream wait for the sum.

        The host waits until all is enqueued; for the sum only where words do not work.

        Args:
            timeout: Seconds that the host waits where it does.

        Raises:
            PeerError: The call has failed already.
        """
        if self._enqueued is not None:
            self._enqueued.result(timeout)
        if self._done is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(self._done)
        if self._future is not None and (self._done is None or self._future.done()):
            self._future.result(timeout)

    def torch_future(self, value: object) -> torch.futures.Future[object]:
        """Return torch's kind of future of a value here: who waits for it waits on the GPU."""
        if self._done is None:
            self.wait()
        future: torch.futures.Future[object] = torch.futures.Future(devices=[self._stream.device])
        enqueued, stream = self._enqueued, self._stream
        problems: list[BaseException] = []

        def check(_: torch.futures.Future[object]) -> object:
            if problems:
                raise problems[0]
            return value

        def finish(of: Future[None] | None) -> None:
            if of is not None and (problem := of.exception()) is not None:
                problems.append(problem)
            with torch.cuda.stream(stream):  # the future notes what is enqueued there by now
                future.set_result(value)

        if enqueued is None or (enqueued.done() and enqueued.exception() is None):
            finish(None)
            return future
        # An error that `then` meets reaches whoever waits in C++; one set directly does not.
        result = future.then(check)
        enqueued.add_done_callback(finish)
        return result


class CudaReducer:
    """One rank's GPU in a group; all ranks make it together.

    Args:
        meeting: How the ranks exchange texts.
        rank: This rank.
        members: All ranks.
        labels: How messages call each.
        device: This rank's GPU; several ranks may share one.
        timeout: Seconds that a rank may be late.
        threads: That add.
        chunk_bytes: What is copied at a time, at most.
        flags: Let streams wait for words where the driver can; off, for tests: the host waits.
        slots: Chunks of a rank that may be under way at a time.

    Raises:
        UnavailableError: A rank could not pin the memory; all ranks raise it.
    """

    def __init__(
        self,
        meeting: Exchange,
        rank: int,
        members: list[segment.Member],
        labels: list[str],
        device: torch.device,
        timeout: float,
        threads: int = 1,
        chunk_bytes: int = CHUNK_BYTES,
        flags: bool = True,
        slots: int = SLOTS,
    ) -> None:
        self._rank, self._labels, self._timeout = rank, labels, timeout
        self.device = device
        layout = segment.Settings(chunk_bytes=chunk_bytes, threads=1, slots=slots)
        group, self.settings, ended = segment.connect(meeting, rank, members, layout, timeout)
        outcome.check(ended, group, labels, rank, "the GPUs' first meeting", timeout)
        path, problem = _open(group, device, flags, threads)
        for peer, text in enumerate(meeting(problem, None)):
            if text:
                raise UnavailableError(f"{labels[peer]} cannot use its GPU: {text}")
        assert path is not None
        self._group, self._path = group, path
        stream: Any = torch.cuda.ExternalStream
        self._out = stream(path.out, device=device)
        self._back = stream(path.back, device=device)
        self._worker = Worker(f"hfreduce-{rank}-{device}")
        self._enqueuer = Worker(f"hfreduce-{rank}-{device}-enqueuing")
        self._lock = threading.RLock()  # a signal's handler may close what it interrupts
        self._next = 1  # the ranks' meeting was chunk 0
        self._failure: BaseException | None = None
        self._pending: deque[tuple[int, int, Future[None], torch.cuda.Event | None]] = deque()
        self._abandoned: list[Tensor] = []  # which streams that were let go may still touch

    @property
    def flags(self) -> bool:
        """Whether streams wait for words, or the host for events."""
        return self._path.flags

    @property
    def busy(self) -> tuple[float, float, float, float]:
        """Seconds in calls so far; and of them with copies out, sums, and copies back under way.

        What is busy all the time is what bounds the rate.
        """
        return self._path.busy

    def trace(self) -> list[tuple[int, str, int, int]]:
        """Return when each chunk passed each stage since the last time, where that is noted.

        It is where the environment has HFREDUCE_TRACE=1 when the group is made. Between calls.

        Returns:
            (nanoseconds of the monotonic clock, one of `STAGES`, chunk, thread that adds or -1).
        """
        return [(at, STAGES[stage], chunk, lane) for at, stage, chunk, lane in self._path.trace()]

    def all_reduce(self, tensor: Tensor, op: object, *, apart: bool = False) -> CudaHandle:
        """Reduce a contiguous tensor in place, after what the current stream does before.

        Args:
            tensor: On this GPU.
            op: "sum", "avg", "min" or "max", or torch's ReduceOp of that name.
            apart: Let another thread enqueue it, where it is large; waiting for it waits for that.
                Callbacks of its future run there, at no fixed place among other calls.

        Raises:
            ValueError: The tensor is not contiguous.
            RuntimeError: A CUDA graph is being captured, or an earlier call failed.
        """
        dtype, number = dtypes.check(tensor.dtype, op)
        if not tensor.is_contiguous():
            raise ValueError("a tensor on a GPU must be contiguous to be reduced in place")
        if torch.cuda.is_current_stream_capturing():
            raise RuntimeError("hfreduce cannot be captured in a CUDA graph: the host has a part")
        pointer, count = tensor.data_ptr(), tensor.numel()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            first = self._next
            self._next = end = (first + self._path.chunks(count, dtype)) % _WRAP
            event: Any = torch.cuda.Event
            ready = event()
            ready.record(torch.cuda.current_stream(self.device))
            before = self._overlapping(pointer, pointer + tensor.nbytes)
            done = event() if self._path.flags else None
            ended: Future[None] = Future()

            def enqueue() -> None:
                try:
                    self._out.wait_event(ready)
                    for other in before:
                        self._out.wait_event(other)
                    # Announced first: the GPU's queues may be shorter than the call.
                    self._path.submit(pointer, count, dtype, number, first)
                    if done is not None:
                        self._path.enqueue(pointer, count, dtype, number, first)
                        done.record(self._back)
                finally:  # afterwards, since its thread takes the GIL for a while
                    self._worker.submit(lambda: self._end(tensor, end), ended)

            enqueued = None
            large = apart and done is not None and tensor.nbytes >= APART_BYTES
            # Nobody waits for that thread with the lock held, which its callbacks may want.
            if large or not self._enqueuer.is_idle:
                enqueued = self._enqueuer.submit(enqueue)
            else:
                self._enqueuer.call(enqueue)
            self._pending.append((pointer, pointer + tensor.nbytes, ended, done))
        return CudaHandle(ended, done, self._back, enqueued)

    def set_timeout(self, seconds: float) -> None:
        """Change how late a rank may be, for calls under way too."""
        self._timeout = seconds
        self._group.set_timeout(seconds)

    def close(self) -> None:
        """End the calls under way with an error, and unpin the memory."""
        self._group.stop()
        self._enqueuer.close()
        self._worker.close()
        with self._lock:  # nobody is enqueuing
            closed = RuntimeError("all_reduce: this Reducer is closed: make a new one on all ranks")
            self._failure = self._failure or closed
            self._path.close()
        self._group.close()
        self._abandoned.clear()

    def _overlapping(self, low: int, high: int) -> list[torch.cuda.Event]:
        """Return what the next call goes out after: the ends of those under way on its memory."""
        while self._pending and self._pending[0][2].done():
            self._pending.popleft()
        events = []
        for first, last, future, done in self._pending:
            if first < high and low < last:
                if done is not None:
                    events.append(done)
                else:
                    future.exception()
        return events

    def _end(self, tensor: Tensor, end: int) -> None:
        """See a call end; the tensor is kept until then."""
        try:
            ended = self._path.wait(end)
            outcome.check(ended, self._group, self._labels, self._rank, "all_reduce", self._timeout)
        except BaseException as error:
            self._failure = error
            self._abandoned.append(tensor)
            raise


def _open(
    group: Group, device: torch.device, flags: bool, threads: int
) -> tuple[CudaPath | None, str]:
    from hfreduce._engine import CudaPath

    try:
        torch.cuda.current_stream(device)  # torch makes the device's context, if nobody has
        with topology.running_on(topology.near(topology.address(device))):  # so do its threads
            return CudaPath(group, device.index, flags, threads), ""
    except RuntimeError as error:
        return None, str(error)
