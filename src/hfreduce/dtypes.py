"""The types and operations that the engine knows, under the numbers of native/reduce.hpp."""

from __future__ import annotations

import torch
from torch import distributed as dist

DTYPES: dict[torch.dtype, int] = {
    torch.float32: 0,
    torch.float16: 1,
    torch.bfloat16: 2,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 4,
    torch.float64: 5,
    torch.int32: 6,
    torch.int64: 7,
    torch.int8: 8,
    torch.uint8: 9,
}
BYTES = DTYPES[torch.uint8]
OPS = {"sum": 0, "avg": 1, "min": 2, "max": 3}
_BY_REDUCE_OP = {"SUM": "sum", "AVG": "avg", "MIN": "min", "MAX": "max"}


def op_name(op: object) -> str | None:
    """Return "sum", "avg", "min" or "max" for a name or a `ReduceOp`; None for any other."""
    if isinstance(op, str):
        return op if op in OPS else None
    if isinstance(op, dist.ReduceOp):
        # A ReduceOp that carries a factor has the same name as one that does not have it in some
        # versions; only PREMUL_SUM has a factor, and it is not in the table.
        for theirs, ours in _BY_REDUCE_OP.items():
            if op == getattr(dist.ReduceOp, theirs):
                return ours
    if isinstance(op, dist.ReduceOp.RedOpType):
        return _BY_REDUCE_OP.get(op.name)
    return None


def is_covered(dtype: torch.dtype, op: object) -> bool:
    """Say whether the engine reduces this type with this operation."""
    name = op_name(op)
    return name is not None and dtype in DTYPES and (name != "avg" or dtype.is_floating_point)


def is_narrow(dtype: torch.dtype) -> bool:
    """Say whether sums of a type are made in float32 because it holds less."""
    return dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize


def check(dtype: torch.dtype, op: object) -> tuple[int, int]:
    """Return the engine's numbers for a reduction.

    Raises:
        TypeError: The type is not reduced, or not averaged.
        ValueError: There is no such operation.
    """
    name = op_name(op)
    if name is None:
        raise ValueError(f"op={op!r} is not known: choose one of {', '.join(OPS)}")
    if dtype not in DTYPES:
        known = ", ".join(str(known).removeprefix("torch.") for known in DTYPES)
        raise TypeError(f"{dtype} cannot be reduced: use one of {known}")
    if name == "avg" and not dtype.is_floating_point:
        raise TypeError(f"an average of {dtype} is not an integer: sum, and divide as you need it")
    return DTYPES[dtype], OPS[name]
