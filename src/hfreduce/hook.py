"""DDP's communication hook: gradients are averaged through a `Reducer`.

    model = torch.nn.parallel.DistributedDataParallel(module)
    model.register_comm_hook(hfreduce.HookState(), hfreduce.average)

What a reducer does not cover (sparse and complex gradients) takes the way that torch takes without
a hook.
"""

# No `from __future__ import annotations`: torch compares the hook's annotations as types.

from collections.abc import Callable

import torch
from torch import Tensor
from torch import distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from hfreduce import dtypes
from hfreduce.backend import ProcessGroup
from hfreduce.cuda import CudaHandle
from hfreduce.errors import SeveralNodesError
from hfreduce.handle import Handle
from hfreduce.nodes import HierarchicalReducer
from hfreduce.reducer import Reducer

WIRES = (None, torch.bfloat16, torch.float16)


class HookState:
    """What the hook needs: one for a model.

    Args:
        group: Of the ranks that average; None: the default group. All of them make the state.
        active: Says whether this rank has data still, where ranks may run out of it and the
            average is to be over those that have (`join` with
            `divide_by_initial_world_size=False`); returns None where the average is over all.
            None: over all, always.
        network: Between nodes, where the ranks are on several: see `HierarchicalReducer`. None: all
            must be on one.
        wire: What float32 gradients are sent as: torch.bfloat16 halves the bytes (between nodes it
            takes a quarter off). They are added in float32 and the average is rounded to it once.
            None: float32; so are they where `active` says who has data.

    Raises:
        UnavailableError: The ranks cannot share memory.
        ValueError: There is no such wire or network.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        active: Callable[[], bool | None] | None = None,
        *,
        network: str | None = None,
        wire: torch.dtype | None = None,
    ) -> None:
        if wire not in WIRES:
            raise ValueError(f"wire={wire} is not known: use torch.bfloat16, torch.float16 or None")
        self.group = group
        self.active = active
        self.wire = wire
        self.reducer: Reducer | HierarchicalReducer
        try:
            theirs = dist.group.WORLD if group is None else group
            # A group of this backend has a reducer already, and one order for all calls.
            self.reducer = (
                theirs.reducer if isinstance(theirs, ProcessGroup) else Reducer.from_group(group)
            )
        except SeveralNodesError:
            if network is None:
                raise
            self.reducer = HierarchicalReducer.from_group(group, network=network)

    def unreached(self, device_type: str) -> str:
        """Return why gradients on such a device go by the process group instead, or nothing."""
        if device_type == "cpu" or isinstance(self.reducer, Reducer):
            return ""
        return (
            f"the ranks are on several machines, where hfreduce takes gradients on the CPU alone: "
            f"those on a {device_type} device go by the process group"
        )


def average(state: HookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """Average a bucket of gradients over all ranks.

    Args:
        state: The model's.
        bucket: Its buffer is averaged in place.

    Returns:
        A future of the buffer.
    """
    gradients = bucket.buffer()
    if not _covers(state, gradients):
        return allreduce_hook(state.group, bucket)  # type: ignore[arg-type]
    active = state.active() if state.active is not None else None
    if active is not None:
        return _average_of_active(state.reducer, gradients, active)
    narrow = state.wire is not None and gradients.dtype == torch.float32
    sent = gradients.to(state.wire) if narrow else gradients
    handle: Handle | CudaHandle | None
    if isinstance(state.reducer, Reducer):  # the thread that is here launches the backward pass
        handle = state.reducer.all_reduce(sent, "avg", async_op=True, apart=True)
    else:
        handle = state.reducer.all_reduce(sent, "avg", async_op=True)
    assert handle is not None
    future = handle.torch_future(sent)
    if not narrow:
        return future  # type: ignore[return-value]

    def widen(averaged: torch.futures.Future[object]) -> Tensor:
        averaged.value()  # raises what the call did
        return gradients.copy_(sent)

    return future.then(widen)


def _covers(state: HookState, gradients: Tensor) -> bool:
    if gradients.layout != torch.strided or not dtypes.is_covered(gradients.dtype, "avg"):
        return False
    return not state.unreached(gradients.device.type)


def _average_of_active(
    reducer: Reducer | HierarchicalReducer, gradients: Tensor, active: bool
) -> torch.futures.Future[Tensor]:
    count = torch.tensor([int(active)])
    reducer.all_reduce(count)
    handle = reducer.all_reduce(gradients, async_op=True)
    assert handle is not None

    def divide(summed: torch.futures.Future[object]) -> Tensor:
        summed.value()
        return gradients.div_(count.item())

    return handle.torch_future(gradients).then(divide)
