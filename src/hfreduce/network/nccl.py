"""Between nodes by NCCL, from this process's GPU: for networks that NCCL drives better than TCP.

A tensor in host memory goes through the GPU in chunks: one is copied there while NCCL reduces the
one before and the one before that comes back, each in a stream of its own. NCCL chooses between its
rings and its double binary trees by the size and the number of nodes. Sums narrower than float32
come as float32 and are rounded once, on the GPU. All nodes get the same bits; the order of the
nodes is NCCL's.

What is said before a call, and small tensors, go by TCP. NCCL itself runs kernels, which take
multiprocessors from other work.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d

from hfreduce.errors import DeadPeerError, LatePeerError, first_line
from hfreduce.network.base import Network, Place
from hfreduce.network.tcp import TcpNetwork

_torch: Any = _distributed_c10d
CHUNK_BYTES = 4 << 20
# Up to here TCP is faster, which adds on the processors: NCCL's way has two copies more, and each
# of its steps starts a kernel.
TCP_BYTES = 2 << 20
SLOTS = 3  # one on its way to the GPU, one on the network, one on its way back
_PAUSES = 0.00001, 0.00005  # seconds between two looks, at first and at last
_GRACE = 5.0  # seconds that the copy after a call may wait for its turn on the GPU
_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"


class NcclNetwork(Network):
    """Nodes connected by NCCL, between the current GPU of each process."""

    name = "nccl"
    lanes = 1  # calls of one communicator must be in the same order on all nodes

    def __init__(self, place: Place) -> None:
        if not (dist.is_nccl_available() and torch.cuda.is_available()):
            raise ImportError("network='nccl' needs a GPU and a torch with NCCL: use 'tcp'")
        self.place = place
        self._device = torch.device("cuda", torch.cuda.current_device())
        self._closed = False
        self._group: Any = None
        # None of the script's settings on stuck collectives, which may end the process: whoever
        # waits here has a time of its own.
        options = _torch.ProcessGroupNCCL.Options()
        options._timeout = timedelta(days=1)
        store = dist.PrefixStore("nccl", place.store)  # type: ignore[attr-defined]
        self._tcp = TcpNetwork(place)
        try:
            with _left_to_us():
                self._group = _torch.ProcessGroupNCCL(store, place.rank, place.size, options)
            with torch.cuda.device(self._device):
                self._in, self._out = (_stream(self._device) for _ in range(2))
                self._slots = [_Slot.on(self._device) for _ in range(SLOTS)]
                # NCCL connects with the first call: whether it can is for now, not for training.
                nothing = torch.zeros(TCP_BYTES // 4 + 1)
                self.all_reduce(nothing, "sum", out=nothing)
        except RuntimeError as error:
            self.close()
            raise ConnectionError(
                f"{place.labels[place.rank]} cannot connect to the other nodes by NCCL from "
                f"{self._device}: {error}; each rank needs a GPU of its own (torch.cuda.set_device "
                f"before the reducer is made), and NCCL_DEBUG=INFO has NCCL say more"
            ) from error

    def tell(self, frame: Tensor, room: int) -> list[Tensor]:
        """See `Network`."""
        return self._tcp.tell(frame, room)

    def all_reduce(
        self, tensor: Tensor, op: str, lane: int = 0, *, out: Tensor, divisor: int = 1
    ) -> None:
        """See `Network`."""
        if tensor.nbytes <= TCP_BYTES:
            self._tcp.all_reduce(tensor, op, lane, out=out, divisor=divisor)
            return
        deadline = time.monotonic() + self.place.timeout
        count = CHUNK_BYTES // max(_carried(tensor.dtype).itemsize, out.element_size())
        parts, results = torch.split(tensor, count), torch.split(out, count)
        with torch.cuda.device(self._device):
            for at in range(len(parts) + SLOTS):
                slot = self._slots[at % SLOTS]
                if at >= SLOTS:
                    self._until(slot, deadline)
                    slot.give(results[at - SLOTS])
                if at < len(parts):
                    self._start(slot, parts[at], results[at], op, divisor)

    def close(self) -> None:
        """See `Network`."""
        if not self._closed:
            self._closed = True
            self._tcp.close()
            # Ends NCCL's kernels too, so that the GPU's streams are let go.
            if self._group is not None:
                self._group.abort()

    def _start(self, slot: _Slot, part: Tensor, result: Tensor, op: str, divisor: int) -> None:
        """Have a chunk brought to the GPU, reduced and brought back; wait for nothing."""
        if self._closed:
            raise DeadPeerError("the network was closed in the middle of a call")
        sent = slot.load(part)
        on_gpu = slot.on_gpu[: sent.nbytes].view(sent.dtype)
        with torch.cuda.stream(self._in):
            on_gpu.copy_(sent, non_blocking=True)
            try:
                slot.work = self._group.allreduce([on_gpu], _OPS[op])
            except RuntimeError as error:
                raise DeadPeerError(
                    f"NCCL lost a node ({first_line(error)}): look for its own error"
                ) from error
        with torch.cuda.stream(self._out):
            slot.work.wait()  # the stream waits, not this thread
            if divisor > 1:
                on_gpu.div_(divisor)
            if result.dtype == torch.float8_e4m3fn:  # before torch 2.13 NaN beyond its end
                end = torch.finfo(result.dtype).max
                on_gpu.clamp_(-end, end)
            back = slot.back[: result.nbytes].view(result.dtype)
            back.copy_(on_gpu.to(result.dtype), non_blocking=True)
            slot.done.record(self._out)

    def _until(self, slot: _Slot, deadline: float) -> None:
        """Return when a chunk is back."""
        pause, longest = _PAUSES
        completed: float | None = None
        while not slot.done.query():
            if self._closed:
                raise DeadPeerError("the network was closed in the middle of a call")
            # A call that met an error of NCCL's, such as a connection that was reset, counts as
            # completed too, but what comes after it in the streams does not happen.
            if not slot.work.is_completed():
                completed = None
            elif completed is None:
                completed = time.monotonic()
            elif time.monotonic() - completed > _GRACE:
                raise DeadPeerError("NCCL lost a node, and says more on stderr: look for its error")
            if time.monotonic() > deadline:
                others = [
                    label for node, label in enumerate(self.place.labels) if node != self.place.rank
                ]
                raise LatePeerError(
                    f"{', '.join(others)}: one of them did not send or receive by NCCL within "
                    f"{self.place.timeout:g} s: it is dead, hangs, or has more to do than the "
                    f"timeout allows",
                    self.place.ranks[1 - self.place.rank] if len(others) == 1 else -1,
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)


@dataclass
class _Slot:
    """Room for a chunk on its way, on the host and on the GPU; in bytes."""

    to: Tensor
    on_gpu: Tensor
    back: Tensor
    done: Any  # torch.cuda.Event, whose methods have no types
    work: Any = None

    @classmethod
    def on(cls, device: torch.device) -> _Slot:
        """Return one for a GPU."""
        to, back = (torch.empty(CHUNK_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(2))
        on_gpu = torch.empty(CHUNK_BYTES, dtype=torch.uint8, device=device)
        return cls(to, on_gpu, back, _event())

    def load(self, part: Tensor) -> Tensor:
        """Return a chunk in memory that the GPU copies from by itself."""
        dtype = _carried(part.dtype)
        if dtype == part.dtype and part.is_pinned():
            return part
        sent = self.to[: part.numel() * dtype.itemsize].view(dtype)
        sent.copy_(part)
        return sent

    def give(self, result: Tensor) -> None:
        """Hand out the chunk that is back."""
        result.copy_(self.back[: result.nbytes].view(result.dtype))


def _carried(dtype: torch.dtype) -> torch.dtype:
    """Return what NCCL is given: it compares no float8."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize == 1 else dtype


_event: Any = torch.cuda.Event  # they have no types
_stream: Any = torch.cuda.Stream
_OPS = {"sum": dist.ReduceOp.SUM, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}


@contextmanager
def _left_to_us() -> Iterator[None]:
    """Have a group of torch's that is made now leave errors to who waits for it."""
    before = os.environ.get(_HANDLING)
    os.environ[_HANDLING] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_HANDLING]
        else:
            os.environ[_HANDLING] = before
