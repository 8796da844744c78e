"""Buffers for asynchronous saves from a GPU, made before the first save needs them."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from hfai.checkpoint import state
from hfai.checkpoint.format import ALIGNMENT, CHUNK
from hfai.checkpoint.parts import find_aliases, is_dtensor, local_of
from hfai.checkpoint.shard import SEGMENT
from hfai.checkpoint.staging import HOST_BUDGET, HostPool

# Values of a parameter that an optimizer keeps which has done no step yet: Adam's two averages.
_VALUES_KEPT = 2


def prepare(
    model: Any,
    optimizer: Any = None,
    *,
    host_budget: int = HOST_BUDGET,
    group: dist.ProcessGroup | None = None,
) -> HostPool:
    """Begin to make the buffers of this rank's asynchronous saves; return before they are made.

        pool = checkpoint.prepare(model, optimizer)
        ...
        checkpoint.save_async("runs/a", model, optimizer, pool=pool)

    A thread page-locks as much memory as this rank writes, within the budget, and leaves the
    training its time; a save that comes before it is done hurries it, and uses what is there. If
    memory cannot be locked, a warning says so, and saves use ordinary memory. Where nothing is on a
    GPU, nothing is made: then buffers come at the first save.

    Of an optimizer that has done no step, two values a parameter are expected, as Adam keeps.

    Args:
        model: As for `save`.
        optimizer: As for `save`.
        host_budget: Bytes of buffers in this rank, at most.
        group: Whose ranks save; plain tensors are taken to be on all of them, of which each writes
            a part. None: the default group.

    Returns:
        The buffers. They exist as long as this object, or until its `trim`.

    Raises:
        StateMismatchError: As for `save`.
        TypeError: As for `save`.
        ValueError: The budget is too small.
    """
    pool = HostPool(host_budget)
    world = dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1
    prepare_pool(pool, model, optimizer, world)
    return pool


def prepare_pool(pool: HostPool, model: Any, optimizer: Any, world: int) -> None:
    """Do so for buffers that exist."""
    importlib.import_module("hfai.checkpoint.api")  # or the first save has to
    captured = state.capture(model, optimizer, None, None, None, None, False, 0)
    aliases = find_aliases(captured.tensors)
    expected = [captured.tensors[name] for name in sorted(captured.tensors) if name not in aliases]
    for one in state.as_list(optimizer, "optimizer") or []:
        if isinstance(one, torch.optim.Optimizer) and not one.state:
            kept = [parameter for group in one.param_groups for parameter in group["params"]]
            expected += _VALUES_KEPT * kept
    on_gpus = [tensor for tensor in expected if local_of(tensor).is_cuda]
    if on_gpus:
        count = segments_of(_share(tensor, world) for tensor in on_gpus)
        pool.prepare(count * SEGMENT, local_of(on_gpus[0]).device)


def segments_of(lengths: Iterable[int]) -> int:
    """Return how many segments slices of such lengths in bytes take; see `shard.segments`."""
    count, filled = 0, 0
    for length in lengths:
        for start in range(0, length, CHUNK):
            chunk = min(CHUNK, length - start)
            if filled and filled + chunk > SEGMENT:
                count, filled = count + 1, 0
            filled += chunk
        if length >= ALIGNMENT:
            filled += -length % ALIGNMENT
    return count + (filled > 0)


def _share(tensor: Tensor, world: int) -> int:
    """Return how many of a tensor's bytes this rank writes, or one more."""
    if not is_dtensor(tensor):
        return -(-tensor.nbytes // world)
    placed: Any = tensor
    copies = [
        placed.device_mesh.size(dim)
        for dim, placement in enumerate(placed.placements)
        if placement.is_replicate()
    ]
    return int(-(-local_of(placed).nbytes // math.prod(copies)))
