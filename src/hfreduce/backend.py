"""hfreduce as a backend of torch.distributed.

    import hfreduce
    dist.init_process_group("hfreduce")

A real ProcessGroup: collectives of CPU tensors go through a `Reducer`; what that does not do
(sending and receiving, products and bit operations, other types, ranks on several machines) is done
by gloo. All-reduces of tensors on GPUs go through the Reducer too, and all else of GPUs to NCCL.
torch's own ProcessGroup reaches the two for what is not overridden here.
The reducer is made by the first collective that uses it, so a group that is not used costs nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C import _distributed_c10d

from hfreduce import dtypes
from hfreduce.cuda import CudaHandle
from hfreduce.errors import UnavailableError
from hfreduce.handle import Handle
from hfreduce.options import options_of
from hfreduce.reducer import Reducer
from hfreduce.work import Work

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

NAME = "hfreduce"
AnyHandle = Handle | CudaHandle | None
_log = logging.getLogger(__name__)
_CPU = torch.device("cpu")
_torch: Any = _distributed_c10d  # where all of torch's names are, in every version
# Each method has several overloads in torch's stubs, of which its own code calls one.
_Base: Any = dist.ProcessGroup


class ProcessGroup(_Base):
    """A group whose collectives of CPU tensors go through memory that its processes share."""

    def __init__(
        self,
        store: Store,
        rank: int,
        size: int,
        timeout: timedelta,
        global_ranks: Sequence[int] = (),
    ) -> None:
        super().__init__(rank, size)
        self._store, self._timeout = store, timeout
        self._label = f"rank {rank}"
        if global_ranks and list(global_ranks) != list(range(size)):
            self._label += f" (global rank {global_ranks[rank]})"
        self._reducer: Reducer | None = None
        self._refusal: UnavailableError | None = None
        self._gpu_unavailable = ""
        # torch's own side of this group reaches for these where nothing is overridden.
        self._inner: Any = _torch.ProcessGroupGloo(
            _torch.PrefixStore("gloo/", store), rank, size, timeout=timeout
        )
        self._inner._set_sequence_number_for_group()
        self._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
        self._register_backend(_CPU, dist.ProcessGroup.BackendType.GLOO, self._inner)
        self._nccl: Any = None
        if torch.cuda.is_available() and dist.is_nccl_available():
            options = _torch.ProcessGroupNCCL.Options()
            options._timeout = timeout
            nccl = _torch.ProcessGroupNCCL(_torch.PrefixStore("nccl/", store), rank, size, options)
            nccl._set_sequence_number_for_group()
            self._nccl = nccl
            self._register_backend(torch.device("cuda"), dist.ProcessGroup.BackendType.NCCL, nccl)

    @property
    def reducer(self) -> Reducer:
        """The group's reducer; all ranks make it together on its first use.

        Raises:
            UnavailableError: The ranks cannot share memory.
        """
        if self._reducer is None:
            if self._refusal is not None:
                raise self._refusal
            try:
                self._reducer = Reducer(
                    self._store, self.rank(), self.size(), timeout=self._timeout, label=self._label
                )
            except UnavailableError as error:
                self._refusal = error
                if self.rank() == 0:
                    _log.warning("%s; gloo does the work of this group", error)
                raise
        return self._reducer

    @property
    def has_reducer(self) -> bool:
        """Whether the group's reducer has been made."""
        return self._reducer is not None

    @property
    def unavailable(self) -> str:
        """Why the ranks cannot share memory, once that has turned out; else nothing."""
        return "" if self._refusal is None else str(self._refusal)

    # ---- collectives, under the names by which torch calls them ----

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce a tensor over all ranks."""
        opts = _torch.AllreduceOptions() if opts is None else opts
        opts = options_of(_torch.AllreduceOptions, opts)
        if not (
            self._covers(tensors, opts.reduceOp) or self._covers_on_gpu(tensors, opts.reduceOp)
        ):
            return self._by_other(tensors[0], "allreduce", tensors, opts)
        return self._run(
            opts,
            tensors,
            lambda group, wait: group.all_reduce(tensors[0], opts.reduceOp, async_op=not wait),
        )

    def allreduce_coalesced(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Reduce several tensors over all ranks."""
        opts = _torch.AllreduceCoalescedOptions() if opts is None else opts
        if not all(self._covers([tensor], opts.reduceOp) for tensor in tensors):
            return self._by_other(tensors[0], "allreduce_coalesced", tensors, opts)
        return self._each(
            opts, tensors, [_bind(Reducer.all_reduce, tensor, opts.reduceOp) for tensor in tensors]
        )

    def reduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        """Reduce a tensor over all ranks into one rank's."""
        if not self._covers(tensors, opts.reduceOp):
            return self._by_other(tensors[0], "reduce", tensors, opts)
        return self._run(
            opts,
            tensors,
            lambda group, wait: group.reduce(
                tensors[0], opts.rootRank, opts.reduceOp, async_op=not wait
            ),
        )

    def broadcast(self, tensors: list[Tensor], opts: Any = None) -> dist.Work:
        """Give all ranks one rank's tensor."""
        opts = options_of(_torch.BroadcastOptions, opts)
        if not self._moves(tensors):
            return self._by_other(tensors[0], "broadcast", tensors, opts)
        return self._run(
            opts,
            tensors,
            lambda group, wait: group.broadcast(tensors[0], opts.rootRank, async_op=not wait),
        )

    def allgather(
        self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Give all ranks the tensors of all."""
        opts = _torch.AllgatherOptions() if opts is None else opts
        if not self._moves([*inputs, *outputs[0]]):
            return self._by_other(inputs[0], "allgather", outputs, inputs, opts)
        return self._run(
            opts,
            outputs[0],
            lambda group, wait: group.all_gather(outputs[0], inputs[0], async_op=not wait),
        )

    def _allgather_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _torch.AllgatherOptions() if opts is None else opts
        if not self._moves([output, tensor]):
            return self._by_other(tensor, "_allgather_base", output, tensor, opts)
        return self._run(
            opts, [output], lambda group, wait: group.all_gather(output, tensor, async_op=not wait)
        )

    all_gather_single = _allgather_base  # its name from torch 2.13 on

    def allgather_into_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Give all ranks several tensors of all."""
        opts = _torch.AllgatherOptions() if opts is None else opts
        if not self._moves([*outputs, *inputs]):
            name = "allgather_into_tensor_coalesced"
            return self._by_other(inputs[0], name, outputs, inputs, opts)
        return self._each(
            opts,
            outputs,
            [
                _bind(Reducer.all_gather, output, tensor)
                for output, tensor in zip(outputs, inputs, strict=True)
            ],
        )

    all_gather_single_coalesced = allgather_into_tensor_coalesced

    def reduce_scatter(
        self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any = None
    ) -> dist.Work:
        """Reduce a list of tensors and give each rank one of them."""
        opts = _torch.ReduceScatterOptions() if opts is None else opts
        if not self._covers([*outputs, *inputs[0]], opts.reduceOp):
            return self._by_other(outputs[0], "reduce_scatter", outputs, inputs, opts)
        return self._run(
            opts,
            outputs,
            lambda group, wait: group.reduce_scatter(
                outputs[0], inputs[0], opts.reduceOp, async_op=not wait
            ),
        )

    def _reduce_scatter_base(self, output: Tensor, tensor: Tensor, opts: Any = None) -> dist.Work:
        opts = _torch.ReduceScatterOptions() if opts is None else opts
        if not self._covers([output, tensor], opts.reduceOp):
            return self._by_other(tensor, "_reduce_scatter_base", output, tensor, opts)
        return self._run(
            opts,
            [output],
            lambda group, wait: group.reduce_scatter(
                output, tensor, opts.reduceOp, async_op=not wait
            ),
        )

    reduce_scatter_single = _reduce_scatter_base

    def reduce_scatter_tensor_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None
    ) -> dist.Work:
        """Reduce several tensors and give each rank a part of each."""
        opts = _torch.ReduceScatterOptions() if opts is None else opts
        if not self._covers([*outputs, *inputs], opts.reduceOp):
            name = "reduce_scatter_tensor_coalesced"
            return self._by_other(inputs[0], name, outputs, inputs, opts)
        return self._each(
            opts,
            outputs,
            [
                _bind(Reducer.reduce_scatter, output, tensor, opts.reduceOp)
                for output, tensor in zip(outputs, inputs, strict=True)
            ],
        )

    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def gather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        """Give one rank the tensors of all."""
        if not self._moves(inputs):
            return self._by_other(inputs[0], "gather", outputs, inputs, opts)
        received = outputs[0] if opts.rootRank == self.rank() else None
        return self._run(
            opts,
            received or [],
            lambda group, wait: group.gather(inputs[0], received, opts.rootRank, async_op=not wait),
        )

    def scatter(self, outputs: list[Tensor], inputs: list[list[Tensor]], opts: Any) -> dist.Work:
        """Give each rank one of one rank's tensors."""
        if not self._moves(outputs):
            return self._by_other(outputs[0], "scatter", outputs, inputs, opts)
        sent = inputs[0] if opts.rootRank == self.rank() else None
        return self._run(
            opts,
            outputs,
            lambda group, wait: group.scatter(outputs[0], sent, opts.rootRank, async_op=not wait),
        )

    def barrier(self, opts: Any = None) -> dist.Work:
        """Wait until all ranks are here."""
        opts = _torch.BarrierOptions() if opts is None else opts
        if not self._can_share():
            return self._by_other(torch.empty(0), "barrier", opts)
        return self._run(opts, [], lambda group, wait: group.barrier(async_op=not wait))

    # ---- the group ----

    def getBackendName(self) -> str:  # noqa: N802 torch's name
        """Return the name under which the backend is registered."""
        return NAME

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how late a rank may be."""
        self._timeout = timeout
        for backend in (self._inner, self._nccl):
            if backend is not None:
                backend._set_default_timeout(timeout)
        if self._reducer is not None:
            self._reducer.set_timeout(timeout)

    def shutdown(self) -> None:
        """Leave the group."""
        if self._reducer is not None:
            self._reducer.close()

    abort = shutdown

    # ---- within ----

    def _can_share(self) -> bool:
        if self._reducer is None and self._refusal is None:
            try:
                return self.reducer is not None
            except UnavailableError:
                return False
        return self._refusal is None

    def _moves(self, tensors: Sequence[Tensor]) -> bool:
        plain = all(
            tensor.device.type == "cpu"
            and tensor.layout == torch.strided
            and tensor.dtype == tensors[0].dtype
            for tensor in tensors
        )
        return plain and self._can_share()

    def _covers(self, tensors: Sequence[Tensor], op: object) -> bool:
        return dtypes.is_covered(tensors[0].dtype, op) and self._moves(tensors)

    def _covers_on_gpu(self, tensors: Sequence[Tensor], op: object) -> bool:
        tensor = tensors[0]
        if (
            self._gpu_unavailable
            or tensor.device.type != "cuda"
            or tensor.layout != torch.strided
            or not tensor.is_contiguous()
            or not dtypes.is_covered(tensor.dtype, op)
            or not self._can_share()
        ):
            return False
        try:
            self.reducer.gpu(tensor.device)
        except UnavailableError as error:
            self._gpu_unavailable = str(error)
            if self.rank() == 0:
                _log.warning("%s; NCCL does the work of this group's GPUs", error)
            return False
        return True

    def _by_other(self, tensor: Tensor, name: str, *arguments: Any) -> dist.Work:
        on_cpu = tensor.device.type == "cpu"
        backend: Any = self._inner if on_cpu else self._get_backend(tensor.device)
        work: dist.Work = getattr(backend, name)(*arguments)
        return work

    def _run(
        self,
        opts: Any,
        results: Sequence[Tensor],
        call: Callable[[Reducer, bool], AnyHandle],
    ) -> dist.Work:
        # Who waits at once is served in its own thread. Old versions of torch do not say.
        wait = not getattr(opts, "asyncOp", True)
        return Work(call(self.reducer, wait), results)

    def _each(
        self,
        opts: Any,
        results: Sequence[Tensor],
        calls: Sequence[Callable[..., AnyHandle]],
    ) -> dist.Work:
        wait = not getattr(opts, "asyncOp", True)
        handle: AnyHandle = None
        for call in calls:
            handle = call(self.reducer, async_op=not wait)
        return Work(handle, results)  # they end in order: the last one's end is all's


def _bind(method: Callable[..., AnyHandle], *arguments: Any) -> Callable[..., AnyHandle]:
    def call(group: Reducer, *, async_op: bool) -> AnyHandle:
        return method(group, *arguments, async_op=async_op)

    return call


def _create(options: Any, _: Any = None) -> ProcessGroup:
    return ProcessGroup(
        options.store,
        options.group_rank,
        options.group_size,
        options.timeout,
        options.global_ranks_in_group,
    )


def register() -> None:
    """Make "hfreduce" known to torch.distributed, once."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
