"""Which products the kernels make, and how one is launched.

Answers come from types, shapes, strides and the device alone; nothing here looks at the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.coverage import why_not_plain
from hfai.kernels.products import plan
from hfai.kernels.products.programs import Programs, programs, runs_on

# Blocks of sum.cu a multiprocessor: each thread then takes several elements.
_SUM_BLOCKS = 8


def why_not(a: Tensor, b: Tensor, out: Tensor) -> str | None:
    """Say why `multiply` does not make a product, or None where it does and is faster than torch.

    Args:
        a: [m, k], of any strides.
        b: [k, n], of any strides.
        out: [m, n].
    """
    for tensor in (a, b, out):
        reason = why_not_tensor(tensor)
        if reason is not None:
            return reason
    if out.stride(1) != 1 and out.shape[1] > 1:
        return "the result's rows are not contiguous"
    device = out.get_device()
    if a.get_device() != device or b.get_device() != device:
        return "the matrices are on several devices"
    return why_not_size(a.shape[0], a.shape[1], b.shape[1], device)


def why_not_tensor(tensor: Tensor) -> str | None:
    """Say why the kernels do not read or write a tensor, or None."""
    if tensor.dtype is not torch.float32:
        return f"{tensor.dtype} is not fp32"
    if tensor.is_neg() or tensor._is_zerotensor():
        return "a sign or zeros are kept aside and not in memory"
    return why_not_plain(tensor)


def why_not_size(m: int, k: int, n: int, device: int) -> str | None:
    """Say why [m, k] times [k, n] is left to torch on a device, by its index, or None."""
    if min(m, k, n) < plan.LEAST_SIZE:
        return f"[{m}, {k}] times [{k}, {n}]: a dimension is under {plan.LEAST_SIZE}"
    reason = jit.why_unavailable(device)
    if reason is not None:
        return reason
    limits = jit.device_limits(device)
    if not runs_on(limits):
        return f"{limits.architecture} has no such instructions: the kernels are for Hopper"
    if not plan.is_worth(m, k, n, limits.multiprocessors):
        return f"[{m}, {k}] times [{k}, {n}]: too small to gain"
    return None


def multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Compute a b + bias into out, on the current stream.

    The error against the exact product is of fp32's own size: docs/kernels/products.md. Values that
    are not finite reach those elements that they reach in fp32.

    Args:
        a: [m, k], `why_not` being None for it, b and out, or too small only.
        b: [k, n].
        out: [m, n]; it may be part of a wider one and must not overlap the others.
        bias: [n], contiguous, added to each row, or None.
    """
    (m, k), n = a.shape, b.shape[1]
    device = out.get_device()
    kernels = programs(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    chosen = plan.choose(m, k, n, jit.device_limits(device).multiprocessors)
    for first in range(0, k, chosen.depth_chunk):
        depth = slice(first, min(first + chosen.depth_chunk, k))
        right = _take_apart(kernels, b[depth].t(), plan.COLUMNS, stream)
        for row in range(0, m, chosen.row_chunk):
            rows = slice(row, row + chosen.row_chunk)
            left = _take_apart(kernels, a[rows, depth], plan.ROWS, stream)
            _multiply_pieces(
                kernels,
                left,
                right,
                depth.stop - first,
                out[rows],
                None if first else bias,
                chosen.splits,
                first > 0,
                stream,
            )


def _take_apart(kernels: Programs, matrix: Tensor, row_tile: int, stream: int) -> Tensor:
    """Return a matrix [rows, depth] as split.cu lays it out, its rows in whole tiles."""
    rows, depth = matrix.shape
    size = plan.piece_bytes(rows, depth, row_tile)
    made = torch.empty(size, dtype=torch.uint8, device=matrix.device)
    kernels.split.launch(
        size // plan.PIECE_PITCH,
        stream,
        matrix.data_ptr(),
        made.data_ptr(),
        rows,
        depth,
        matrix.stride(0),
        matrix.stride(1),
        plan.tiles(depth, plan.DEPTH),
    )
    return made


def _multiply_pieces(
    kernels: Programs,
    left: Tensor,
    right: Tensor,
    depth: int,
    out: Tensor,
    bias: Tensor | None,
    splits: int,
    add: bool,
    stream: int,
) -> None:
    """Multiply what `_take_apart` made of a and of b's transpose into out, or add it there."""
    m, n = out.shape
    depth_pieces = plan.tiles(depth, plan.DEPTH)
    splits = min(splits, depth_pieces)
    made = out if splits == 1 else out.new_empty(splits, m, n)
    bias_at = 0 if bias is None else bias.data_ptr()
    items = plan.tiles(m, plan.ROWS) * plan.tiles(n, plan.COLUMNS) * splits
    kernels.product.launch(
        min(items, kernels.product.resident_blocks),
        stream,
        left.data_ptr(),
        right.data_ptr(),
        made.data_ptr(),
        bias_at if splits == 1 else 0,
        m,
        n,
        depth_pieces,
        made.stride(-2),
        0 if splits == 1 else m * n,
        splits,
        add and splits == 1,
    )
    if splits > 1:
        multiprocessors = jit.device_limits(out.get_device()).multiprocessors
        kernels.sum.launch(
            min(plan.tiles(m * n, plan.SUM_THREADS), _SUM_BLOCKS * multiprocessors),
            stream,
            made.data_ptr(),
            out.data_ptr(),
            bias_at,
            m,
            n,
            out.stride(0),
            splits,
            add,
        )
