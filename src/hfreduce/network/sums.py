"""What is added between nodes, by every engine alike: in the order of the nodes, rounded once."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import Tensor

from hfreduce import dtypes


def combine(parts: Sequence[Tensor], out: Tensor, op: str) -> None:
    """Reduce tensors element by element, from the first to the last.

    Args:
        parts: Of one dimension, contiguous, of one size and type.
        out: Where the result goes; it may be one of them.
        op: "sum", "min" or "max".
    """
    from hfreduce import _engine

    if not out.numel():
        return
    dtype, number = dtypes.check(out.dtype, op)
    _engine.combine(
        os.environ.get("HFREDUCE_INSTRUCTIONS", ""),
        dtype,
        number,
        [part.data_ptr() for part in parts],
        out.data_ptr(),
        0,
        out.numel(),
    )


def finish(tensor: Tensor, out: Tensor, divisor: int) -> None:
    """Divide a sum in place, and round it to the type of `out`."""
    if divisor > 1:
        tensor.div_(divisor)
    if out.data_ptr() == tensor.data_ptr():
        return
    if tensor.dtype != out.dtype == torch.float8_e4m3fn:
        # Before torch 2.13 a conversion gives NaN beyond its end.
        end = torch.finfo(out.dtype).max
        tensor.clamp_(-end, end)
    out.copy_(tensor)
