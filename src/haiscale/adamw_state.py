"""A shard's state for checkpoints and back: what torch.optim.AdamW keeps, cut to the shard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from haiscale.adamw_checks import MOMENTS
from haiscale.shards import Bucket
from hfreduce import Reducer


def state_of(
    bucket: Bucket, inner: torch.optim.AdamW | None, reducer: Reducer | None
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield each parameter of a bucket that has a state, and the state; all ranks call it.

    Args:
        bucket: Whose shards are put together.
        inner: Of this rank's shard, unless that is empty.
        reducer: Of the ranks; None: this one alone.
    """
    steps = torch.zeros(len(bucket.params))
    size = bucket.gradient.numel()
    rows = {name: torch.zeros(size, dtype=bucket.exact) for name in MOMENTS}
    for segment in bucket.segments:
        assert inner is not None
        held = inner.state.get(segment.master)
        if held:
            steps[segment.index] = held["step"]
            for name, row in rows.items():
                row[segment.low : segment.high] = held[name]
    if reducer is not None:
        reducer.all_reduce(steps, "max")
    if bucket.params[0].dtype not in (torch.float32, torch.float64):
        rows["master"] = bucket.copy_masters()
        bucket.take_changes(rows["master"])
    whole = {name: bucket.spread(_whole(bucket, row, reducer)) for name, row in rows.items()}
    for index, param in enumerate(bucket.params):
        if steps[index]:
            found = {name: parts[index] for name, parts in whole.items()}
            yield param, {"step": steps[index].clone(), **found}


def take_state(
    bucket: Bucket, inner: torch.optim.AdamW | None, held: Sequence[Mapping[str, Any] | None]
) -> None:
    """Take on a shard's part of the states of a bucket's parameters.

    Args:
        bucket: Whose shard it is.
        inner: Of this rank's shard, unless that is empty.
        held: The state of each parameter of the bucket, if it has one.
    """
    bucket.load_parameters()
    for segment in bucket.segments:
        assert inner is not None
        state = held[segment.index]
        inner.state.pop(segment.master, None)
        if not state:
            continue
        parts = {name: bucket.part(segment, state[name]) for name in MOMENTS}
        inner.state[segment.master] = {
            "step": torch.as_tensor(state["step"]).float().reshape(()).cpu().clone(),
            **{name: part.to("cpu", bucket.exact, copy=True) for name, part in parts.items()},
        }
        # Parameters that are their own master weights count as they are.
        if not bucket.is_direct and state.get("master") is not None:
            segment.master.copy_(bucket.part(segment, state["master"]))


def rebind(bucket: Bucket, inner: torch.optim.AdamW) -> None:
    """Have the optimizer of a direct shard step the parameters where they are now."""
    before = [segment.master for segment in bucket.segments]
    bucket.bind()
    for old, segment in zip(before, bucket.segments, strict=True):
        if (held := inner.state.pop(old, None)) is not None:
            inner.state[segment.master] = held
    inner.param_groups[0]["params"] = [segment.master for segment in bucket.segments]


def _whole(bucket: Bucket, row: Tensor, reducer: Reducer | None) -> Tensor:
    """Return all ranks' shards of something, in a row."""
    if reducer is None:
        return row
    sizes = [shard.numel() for shard in bucket.shards]
    whole = torch.empty(sum(sizes), dtype=row.dtype)
    reducer.all_gather(list(torch.split(whole, sizes)), row)
    return whole
