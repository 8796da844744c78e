"""What a rank may call: each method checks its tensors, and is one entry into the native engine.

Calls are carried out in the order they are made, which must be the same on all ranks; see
native/collectives.hpp for what happens there. How a group comes to be is in reducer.py.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from hfreduce import arguments, dtypes, outcome
from hfreduce.cuda import CudaHandle, CudaReducer
from hfreduce.handle import Handle
from hfreduce.tensors import Flat, flat, pointers
from hfreduce.worker import Worker

if TYPE_CHECKING:
    from hfreduce._engine import Group

Job = Callable[[], None]
_BARRIER, _ALL_REDUCE, _REDUCE, _BROADCAST, _ALL_GATHER, _REDUCE_SCATTER, _GATHER, _SCATTER = range(
    8
)


class Collectives(ABC):
    """The collectives of a `Reducer`, which gives it all that it has.

    Attributes:
        rank: This rank.
        world_size: The number of ranks.
        timeout: Seconds that a rank may be late.
        labels: How messages call each rank.
    """

    rank: int
    world_size: int
    timeout: float
    labels: list[str]
    _group: Group
    _worker: Worker
    _process: int

    @abstractmethod
    def gpu(self, device: torch.device) -> CudaReducer:
        """Return the group's part for a GPU of this rank; all ranks make it together, once."""

    def all_reduce(
        self, tensor: Tensor, op: object = "sum", *, async_op: bool = False, apart: bool = False
    ) -> Handle | CudaHandle | None:
        """Reduce a tensor over all ranks, in place.

        Args:
            tensor: Of the same type and number of elements on all ranks; on the CPU, or on all
                ranks on a GPU: later work of the current stream waits for it there.
            op: "sum", "avg", "min" or "max", or torch's ReduceOp of that name.
            async_op: Return a handle at once.
            apart: Let another thread enqueue a large tensor of a GPU, where `async_op` is true.
                Callbacks of the call's future run there then: they make no collectives.

        Raises:
            TypeError: The type is not reduced; `hfreduce.dtypes.DTYPES` has those that are.
            PeerError: Another rank died, came too late, or called something else.
        """
        dtype, number = dtypes.check(arguments.tensor(tensor).dtype, op)
        if tensor.device.type == "cuda":
            return self._reduce_on_gpu(tensor, op, async_op, apart)
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

    def _reduce_on_gpu(
        self, tensor: Tensor, op: object, async_op: bool, apart: bool
    ) -> CudaHandle | None:
        self._check_process()
        if self.world_size == 1:
            done = CudaHandle(None, None, torch.cuda.current_stream(tensor.device))
            return done if async_op else None
        handle = self.gpu(tensor.device).all_reduce(tensor, op, apart=apart and async_op)
        if async_op:
            return handle
        handle.wait()
        return None

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
