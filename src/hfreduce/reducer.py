"""Collectives of the processes on one machine, through memory that they share.

    reducer = hfreduce.Reducer(store, rank, world_size)
    reducer.all_reduce(tensor)                              # in place
    handle = reducer.all_reduce(tensor, "avg", async_op=True)
    handle.wait()

A call is one entry into the native engine, without the GIL: see native/collectives.hpp for what
happens there. Calls are carried out in the order they are made, which must be the same on all
ranks.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch import distributed as dist

from hfreduce import arguments, dtypes, exchange, outcome, segment, topology
from hfreduce.cuda import CHUNK_BYTES as GPU_CHUNK_BYTES
from hfreduce.cuda import MOST_THREADS as MOST_GPU_THREADS
from hfreduce.cuda import SLOTS as GPU_SLOTS
from hfreduce.cuda import CudaHandle, CudaReducer
from hfreduce.handle import Handle
from hfreduce.tensors import Flat, flat, pointers
from hfreduce.worker import Worker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hfreduce._engine import Group

Job = Callable[[], None]
_BARRIER, _ALL_REDUCE, _REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER, _GATHER, _SCATTER = range(
    8
)
DEFAULT_TIMEOUT = 600.0


class Reducer:
    """One rank's end of a group whose processes all run on one machine.

    Tensors are on the CPU, of any shape and strides; results are written into them. Sums and
    averages are made in float32 (float64 and integers: as they are) in the order of the ranks and
    rounded once, so every rank and every run gets the same bits.

    Args:
        store: That all ranks reach, to find each other.
        rank: This rank, from 0.
        world_size: The number of ranks.
        timeout: Seconds, or a timedelta, that a rank may be late for a step of a collective.
        name: Of the group, where several use one store.
        threads: That each rank works with; None: up to 4, where there are two processors for each.
        chunk_bytes: What is sent, added and fetched at a time; a multiple of 64.
        label: How messages call this rank; None: "rank" and its number.

    Raises:
        LatePeerError: A rank did not come within the timeout.
        UnavailableError: The ranks are not all on one machine, or the native engine was not built.
        ValueError: An argument makes no sense.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        name: str = "group",
        threads: int | None = None,
        chunk_bytes: int = segment.CHUNK_BYTES,
        label: str | None = None,
    ) -> None:
        seconds = arguments.seconds(timeout)
        arguments.check_rank(rank, world_size)
        meeting = exchange.through_store(store, rank, world_size, name, seconds)
        self._connect(meeting, rank, world_size, seconds, threads, chunk_bytes, label)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | timedelta | None = None,
        threads: int | None = None,
        chunk_bytes: int = segment.CHUNK_BYTES,
    ) -> Reducer:
        """Return a reducer for the ranks of a process group, whatever its backend.

        Args:
            group: That meets to make the reducer; None: the default group.
            timeout: As for the class; None: the group's own.
            threads: As for the class.
            chunk_bytes: As for the class.
        """
        self = cls.__new__(cls)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        label = f"rank {rank} (global rank {dist.get_rank()})" if group is not None else None
        if timeout is None:
            timeout = exchange.timeout_of(group) or DEFAULT_TIMEOUT
        seconds = arguments.seconds(timeout)
        meeting = exchange.through_group(group, seconds)
        self._connect(meeting, rank, world_size, seconds, threads, chunk_bytes, label)
        return self

    def _connect(
        self,
        meeting: exchange.Exchange,
        rank: int,
        world_size: int,
        timeout: float,
        threads: int | None,
        chunk_bytes: int,
        label: str | None,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        arguments.check_layout(world_size, threads, chunk_bytes)
        members = segment.meet(meeting, label or f"rank {rank}")
        self.labels = [f"{member.label} (pid {member.pid})" for member in members]
        if threads is None:
            threads = segment.default_threads(topology.processors(), world_size)
        group, settings, ended = segment.connect(
            meeting, rank, members, segment.Settings(chunk_bytes, threads), timeout
        )
        outcome.check(ended, group, self.labels, rank, "the group's first meeting", timeout)
        self.settings = settings
        self._group, self._process = group, os.getpid()
        self._worker = Worker(f"hfreduce-{rank}", group.interrupt)
        self._members = members
        self._gpus: dict[int, CudaReducer] = {}
        self._end = weakref.finalize(self, _end, group, self._worker, self._process, self._gpus)

    # ---- collectives ----

    def all_reduce(
        self, tensor: Tensor, op: object = "sum", *, async_op: bool = False
    ) -> Handle | CudaHandle | None:
        """Reduce a tensor over all ranks, in place.

        Args:
            tensor: Of the same type and number of elements on all ranks; on the CPU, or on all
                ranks on a GPU: later work of the current stream waits for it there.
            op: "sum", "avg", "min" or "max", or torch's ReduceOp of that name.
            async_op: Return a handle at once.

        Raises:
            TypeError: The type is not reduced; `hfreduce.dtypes.DTYPES` has those that are.
            PeerError: Another rank died, came too late, or called something else.
        """
        dtype, number = dtypes.check(arguments.tensor(tensor).dtype, op)
        if tensor.device.type == "cuda":
            return self._reduce_on_gpu(tensor, op, async_op)
        data = flat(tensor)
        job = self._job(
            _ALL_REDUCE, dtype, number, 0, [data], [data], [tensor.numel()], "all_reduce"
        )
        return self._start(job, async_op)

    def reduce(
        self, tensor: Tensor, dst: int, op: object = "sum", *, async_op: bool = False
    ) -> Handle | None:
        """Reduce a tensor over all ranks into the one of rank `dst`; the others keep theirs."""
        dtype, number = dtypes.check(arguments.tensor(tensor).dtype, op)
        data = flat(tensor)
        targets = [data] if self._root(dst) == self.rank else []
        job = self._job(_REDUCE, dtype, number, dst, [data], targets, [tensor.numel()], "reduce")
        return self._start(job, async_op)

    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool = False) -> Handle | None:
        """Give all ranks the tensor of rank `src`."""
        data, sends = flat(arguments.tensor(tensor)), self._root(src) == self.rank
        sources, targets = ([data], []) if sends else ([], [data])
        job = self._job(
            _BROADCAST, dtypes.BYTES, 0, src, sources, targets, [data.nbytes], "broadcast"
        )
        return self._start(job, async_op)

    def all_gather(
        self, outputs: Tensor | Sequence[Tensor], tensor: Tensor, *, async_op: bool = False
    ) -> Handle | None:
        """Give all ranks the tensors of all.

        Args:
            outputs: One tensor for each rank, of that rank's size (they may differ); or one tensor
                that is split evenly along its memory.
            tensor: This rank's.
            async_op: Return a handle at once.

        Raises:
            ValueError: The outputs do not fit.
        """
        targets = arguments.parts(self.world_size, outputs, arguments.tensor(tensor), "outputs")
        data = flat(tensor)
        if targets[self.rank].nbytes != data.nbytes:
            raise ValueError(
                f"outputs[{self.rank}] has {targets[self.rank].nbytes} bytes and this rank's "
                f"tensor {data.nbytes}: give each rank's own size"
            )
        counts = [part.nbytes for part in targets]
        job = self._job(_ALL_GATHER, dtypes.BYTES, 0, 0, [data], targets, counts, "all_gather")
        return self._start(job, async_op)

    def reduce_scatter(
        self,
        output: Tensor,
        inputs: Tensor | Sequence[Tensor],
        op: object = "sum",
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Reduce a list of tensors over all ranks and give rank r the r-th.

        Args:
            output: Of the size of this rank's part.
            inputs: One tensor for each rank, of the sizes that all ranks give (they may differ from
                each other); or one tensor that is split evenly along its memory.
            op: As for `all_reduce`.
            async_op: Return a handle at once.

        Raises:
            ValueError: The inputs do not fit.
        """
        dtype, number = dtypes.check(arguments.tensor(output).dtype, op)
        sources = arguments.parts(self.world_size, inputs, output, "inputs")
        target, item = flat(output), output.element_size()
        if sources[self.rank].nbytes != target.nbytes:
            raise ValueError(
                f"inputs[{self.rank}] has {sources[self.rank].nbytes} bytes and the output "
                f"{target.nbytes}: both are this rank's part"
            )
        counts = [part.nbytes // item for part in sources]
        job = self._job(
            _REDUCE_SCATTER, dtype, number, 0, sources, [target], counts, "reduce_scatter"
        )
        return self._start(job, async_op)

    def gather(
        self,
        tensor: Tensor,
        gather_list: Sequence[Tensor] | None = None,
        dst: int = 0,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Give rank `dst` the tensors of all, which have one size.

        Args:
            tensor: This rank's.
            gather_list: On rank `dst` one tensor for each rank; None elsewhere.
            dst: Who receives.
            async_op: Return a handle at once.
        """
        data, receives = flat(arguments.tensor(tensor)), self._root(dst) == self.rank
        targets: list[Flat] = []
        if receives:
            if gather_list is None:
                raise ValueError(f"rank {dst} gathers: it needs gather_list, a tensor a rank")
            targets = arguments.parts(
                self.world_size, gather_list, tensor, "gather_list", equal=True
            )
        counts = [data.nbytes] * self.world_size
        job = self._job(_GATHER, dtypes.BYTES, 0, dst, [data], targets, counts, "gather")
        return self._start(job, async_op)

    def scatter(
        self,
        tensor: Tensor,
        scatter_list: Sequence[Tensor] | None = None,
        src: int = 0,
        *,
        async_op: bool = False,
    ) -> Handle | None:
        """Give rank r the r-th tensor of rank `src`; they have one size.

        Args:
            tensor: Where this rank's goes.
            scatter_list: On rank `src` one tensor for each rank; None elsewhere.
            src: Who sends.
            async_op: Return a handle at once.
        """
        data, sends = flat(arguments.tensor(tensor)), self._root(src) == self.rank
        sources: list[Flat] = []
        if sends:
            if scatter_list is None:
                raise ValueError(f"rank {src} scatters: it needs scatter_list, a tensor a rank")
            sources = arguments.parts(
                self.world_size, scatter_list, tensor, "scatter_list", equal=True
            )
        counts = [data.nbytes] * self.world_size
        job = self._job(_SCATTER, dtypes.BYTES, 0, src, sources, [data], counts, "scatter")
        return self._start(job, async_op)

    def barrier(self, *, async_op: bool = False) -> Handle | None:
        """Wait until all ranks are here."""
        return self._start(
            self._job(_BARRIER, dtypes.BYTES, 0, 0, [], [], [0], "barrier"), async_op
        )

    # ---- the group ----

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the ranks share, GPUs' left out."""
        return self._group.nbytes

    @property
    def gpus(self) -> Mapping[int, CudaReducer]:
        """The parts of this rank's GPUs that have been used, by index."""
        return self._gpus

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Change how late a rank may be, for the calls that follow."""
        self.timeout = arguments.seconds(timeout)
        self._group.set_timeout(self.timeout)
        for gpu in self._gpus.values():
            gpu.set_timeout(self.timeout)

    def abandon(self) -> None:
        """Break the group because this rank lost its way to other nodes: all calls fail."""
        self._group.abandon()

    def close(self) -> None:
        """Leave the group: calls under way end with an error, and other ranks are told.

        It is not needed: when the process ends or the reducer is no longer used, this happens.
        """
        self._end()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a Reducer belongs to its process: make one in each")

    # ---- within ----

    def _check_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                f"this Reducer belongs to process {self._process}, which forked this one: "
                f"make a new one here, or start processes with the method 'spawn'"
            )

    def _start(self, job: Job, async_op: bool) -> Handle | None:
        self._check_process()
        if async_op:
            return Handle(self._worker.submit(job), self._group.interrupt)
        self._worker.call(job)
        return None

    def _reduce_on_gpu(self, tensor: Tensor, op: object, async_op: bool) -> CudaHandle | None:
        self._check_process()
        if self.world_size == 1:
            done = CudaHandle(None, None, torch.cuda.current_stream(tensor.device))
            return done if async_op else None
        handle = self.gpu(tensor.device).all_reduce(tensor, op, apart=async_op)
        if async_op:
            return handle
        handle.wait()
        return None

    def gpu(
        self,
        device: torch.device,
        *,
        chunk_bytes: int = GPU_CHUNK_BYTES,
        flags: bool = True,
        slots: int = GPU_SLOTS,
        threads: int | None = None,
    ) -> CudaReducer:
        """Return the group's part for a GPU of this rank; all ranks make it together, once.

        Args:
            device: With its index.
            chunk_bytes: What is copied at a time, at most; a multiple of 4096.
            flags: Let streams wait for words where the driver can, and not the host for events.
            slots: Chunks of this rank that may be under way at a time, from 4 on.
            threads: That add; None: up to 6, where there are two processors for each.

        Raises:
            UnavailableError: A rank could not pin the memory.
        """
        if device.index not in self._gpus:
            if threads is None:
                threads = segment.default_threads(
                    topology.processors(), self.world_size, MOST_GPU_THREADS
                )
            arguments.check_layout(self.world_size, threads, chunk_bytes, slots)
            self._gpus[device.index] = CudaReducer(
                exchange.through_collectives(self),
                self.rank,
                self._members,
                self.labels,
                device,
                self.timeout,
                threads,
                chunk_bytes,
                flags,
                slots,
            )
        return self._gpus[device.index]

    def _job(
        self,
        kind: int,
        dtype: int,
        op: int,
        root: int,
        sources: list[Flat],
        targets: list[Flat],
        counts: list[int],
        what: str,
    ) -> Job:
        group, labels, rank, timeout = self._group, self.labels, self.rank, self.timeout
        source_pointers, target_pointers = pointers(sources), pointers(targets)

        def job() -> None:
            signals = threading.current_thread() is threading.main_thread()
            for part in sources:
                part.load()
            ended = group.run(
                kind, dtype, op, rank, root, source_pointers, target_pointers, counts, signals
            )
            if ended[0]:
                outcome.check(ended, group, labels, rank, what, timeout)
            for part in targets:
                part.store()

        return job

    def _root(self, rank: int) -> int:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"there is no rank {rank}: the group has {self.world_size}, from 0")
        return rank


def _end(group: Group, worker: Worker, process: int, gpus: dict[int, CudaReducer]) -> None:
    if os.getpid() == process:  # a forked child owns nothing here
        for gpu in gpus.values():
            gpu.close()
        group.stop()
        worker.close()
        group.close()
