"""Kernel time: CUDA graph replay over rotated input sets, L2 cold.

A graph holds one call on each of several input sets, none of which shares memory with another, and
the time of a replay is divided by their number: launch gaps of the host are gone, and the cost of
the two events and of starting the graph is spread over them. Before each replay, outside the
timed part, a kernel reads and writes twice the L2 cache's size: no input is served from L2, and
L2 is left as a streaming kernel leaves it, half full of lines still to be written back. (A flush
that only writes would charge the kernel for a whole cache of write-backs, one that only reads
would give it a whole cache of free writes.)

The backward pass is captured by itself: the forward runs before the capture, eagerly and on the
capture's own stream (autograd runs a backward on the stream of its forward), and keeps its graph.

Everything here must run inside `with torch.cuda.stream(side_stream)`: a graph cannot be captured
on the default stream, and leaves first used on another stream would draw that stream into the
capture.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from benchmarks.harness.case import Inputs
from benchmarks.harness.result import first_line
from benchmarks.harness.timing import device_event, elapsed_ms, no_collection

TARGET_MS = 2.0  # a replay's length; the events and the graph's start cost about 10 µs of it
TARGET_MS_IN_GRID = 1.0
SHORTEST_KERNEL_MS = 0.002  # even an empty kernel takes about this long in a graph
MOST_SETS = 64
MEMORY_SHARE = 0.25  # of the free memory, for the input sets; outputs and peers need the rest
CACHED_BYTES_KEPT = 1 << 30
# What no output of a benchmark comes near, while products of two do not overflow: infinity times
# zero would be a NaN again.
LARGE = {
    torch.float16: 2.0**15,
    torch.bfloat16: 2.0**40,
    torch.float32: 2.0**40,
    torch.float64: 2.0**40,
}

EventPair = tuple[torch.cuda.Event, torch.cuda.Event]


def set_count(
    floor_ms: float, set_bytes: int, free_bytes: int, target_ms: float = TARGET_MS
) -> int:
    """Return how many input sets a graph rotates over.

    Args:
        floor_ms: the least time of one call.
        set_bytes: the memory of one set.
        free_bytes: the memory to choose a share of.
        target_ms: the least length of a replay.
    """
    wanted = math.ceil(target_ms / max(floor_ms, SHORTEST_KERNEL_MS))
    room = int(MEMORY_SHARE * free_bytes) // max(set_bytes, 1)
    return max(1, min(wanted, MOST_SETS, room))


class Pool:
    """The memory that the graphs of one case share.

    Outputs are dropped after a capture, and the next capture writes its own over them; replays
    never read another graph's outputs. torch gives a pool up with the last graph in it and then
    refuses its handle, so a graph of one small kernel stays in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.handle = torch.cuda.graph_pool_handle()
        self._keeper = torch.cuda.CUDAGraph()
        torch.cuda.synchronize(device)
        self._keeper.capture_begin(pool=self.handle)
        torch.zeros(1, device=device)
        self._keeper.capture_end()


class Flush:
    """A kernel that reads and writes twice L2's size, and leaves nothing of earlier tensors in it.

    It adds rather than copies: a copy may go past the multiprocessors and their way of caching.
    """

    def __init__(self, device: torch.device) -> None:
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        self._source = torch.zeros(2 * l2_bytes // 4, dtype=torch.float32, device=device)
        self._target = torch.empty_like(self._source)

    def __call__(self) -> None:
        """Enqueue the kernel."""
        torch.add(self._source, 1.0, out=self._target)


@dataclass
class Pass:
    """One pass (forward or backward) of one implementation on every input set, ready to time.

    Attributes:
        run: enqueues all of them.
        sets: how many calls that is.
        method: "graph", or "events" where the pass could not be captured and `run` calls eagerly.
        reason: why it could not be captured.
        note: what a reader of its time should know besides.
        keep: what the captured kernels read, kept alive as long as the pass.
    """

    run: Callable[[], object]
    sets: int
    method: str
    reason: str = ""
    note: str = ""
    keep: Sequence[object] = ()

    def timer(self, flush: Flush) -> Callable[[], EventPair]:
        """Return a function that enqueues one timed run and returns its events."""

        def sample() -> EventPair:
            begin, end = device_event(), device_event()
            flush()
            begin.record()
            self.run()
            end.record()
            return begin, end

        return sample

    def milliseconds(self, events: EventPair) -> float:
        """Return the time of one call, once the device has passed both events."""
        return elapsed_ms(*events) / self.sets


def forward_pass(calls: Sequence[Callable[[], Tensor]], pool: Pool) -> Pass:
    """Capture the forward of every call, autograd's bookkeeping included."""

    def run() -> list[Tensor]:
        # All outputs live until the last is written: were one freed, the next would be written
        # over it, into lines that L2 still holds.
        return [call().detach() for call in calls]

    def run_eagerly() -> None:
        for call in calls:
            call()

    return _capture(Pass(run_eagerly, len(calls), "events"), run, pool)


def backward_pass(
    calls: Sequence[Callable[[], Tensor]],
    inputs: Sequence[Inputs],
    grad_outputs: Sequence[Tensor],
    pool: Pool,
) -> Pass:
    """Run the forward of every call once, then capture their backward alone.

    Args:
        calls: the bound forward calls.
        inputs: their input sets.
        grad_outputs: what to pass backward, one tensor for each set: the set's own, or a copy where
            the implementation overwrites it.
        pool: shared by the graphs of one case.
    """
    edges = [_edge_into(call()) for call in calls]
    leaves = [list(one.leaves.values()) for one in inputs]

    def gradients(i: int) -> tuple[Tensor, ...]:
        return torch.autograd.grad([edges[i]], leaves[i], [grad_outputs[i]], retain_graph=True)

    def run() -> list[Tensor]:
        return [gradient for i in range(len(calls)) for gradient in gradients(i)]

    def run_eagerly() -> None:
        for i in range(len(calls)):
            gradients(i)

    gradients(0)  # what is compiled or allocated once must not be part of the capture
    uncaptured = Pass(run_eagerly, len(calls), "events", keep=[edges, leaves, grad_outputs])
    return _capture(uncaptured, run, pool, grad_outputs)


def _edge_into(output: Tensor) -> GradientEdge:
    """Return what a backward can start from without the output, whose memory is not needed for it.

    A Python function's node does not own the graph behind it. The view's node, which is C++, does,
    and adds no kernel to the backward.
    """
    return get_gradient_edge(output.view_as(output))


def _capture(
    uncaptured: Pass,
    run: Callable[[], list[Tensor]],
    pool: Pool,
    read_again: Sequence[Tensor] = (),
) -> Pass:
    """Capture `run` into `pool`; where that fails return `uncaptured`, with the reason.

    `read_again` are tensors that a replay reads and that its outputs may lie in.
    """
    torch.cuda.synchronize()
    if torch.cuda.memory_reserved() - torch.cuda.memory_allocated() > CACHED_BYTES_KEPT:
        torch.cuda.empty_cache()  # a capture cannot draw on memory cached outside its pool
    graph = torch.cuda.CUDAGraph()
    try:
        with no_collection():
            graph.capture_begin(pool=pool.handle)
            try:
                outputs = run()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # says only that the capture is broken
                    graph.capture_end()
                raise
            graph.capture_end()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        torch.cuda.synchronize()
        return replace(uncaptured, reason=first_line(error))
    # An output written over what the next replay reads would carry its poison round for ever.
    read = {tensor.untyped_storage().data_ptr() for tensor in read_again}
    own = [output for output in outputs if output.untyped_storage().data_ptr() not in read]
    note = check_written(graph.replay, own) if own else ""
    keep = [*uncaptured.keep, graph]
    return replace(uncaptured, run=graph.replay, method="graph", keep=keep, note=note)


def check_written(replay: Callable[[], object], outputs: Sequence[Tensor]) -> str:
    """Replay over poisoned outputs and require that every element of each was written.

    Outputs lie where temporaries of the graph's other calls lay, so a kernel that multiplies memory
    that nobody wrote by zero makes a NaN of NaN there, though it writes every element: cuDNN's
    kernels for small recurrent layers are thought to. A poison that times zero is zero tells the
    two apart.

    Returns:
        What is to be noted of the graph, or "".

    Raises:
        RuntimeError: an element was not written, or something was added to what lay there.
    """
    for output in outputs:
        output.fill_(math.nan)
    replay()
    # A sum carries any NaN to the host without a second tensor of the output's size.
    unwritten = [output.sum(dtype=torch.float32).isnan() for output in outputs]
    if not bool(torch.stack(unwritten).any()):
        return ""
    for output in outputs:
        output.fill_(LARGE[output.dtype])
    replay()
    # One extreme each, for the same reason. A NaN fails both comparisons.
    extremes = [torch.stack([-output.amin(), output.amax()]) for output in outputs]
    written = [
        (extreme < LARGE[output.dtype] / 2).all()
        for extreme, output in zip(extremes, outputs, strict=True)
    ]
    if not bool(torch.stack(written).all()):
        raise RuntimeError("a replay of its CUDA graph left elements of an output unwritten")
    return "NaN in memory that it reads and nobody wrote reaches its outputs"
