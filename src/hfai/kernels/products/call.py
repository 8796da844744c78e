"""Which products the kernels make, and how one is launched.

Answers come from types, shapes, strides and the device alone; nothing here looks at the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.coverage import why_not_plain
from hfai.kernels.products import plan
from hfai.kernels.products.programs import programs, runs_on

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
    if min(m, n) < plan.LEAST_SIZE or k < plan.LEAST_DEPTH:
        return f"[{m}, {k}] times [{k}, {n}]: a dimension is too small"
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
    multiprocessors = jit.device_limits(device).multiprocessors
    chosen = plan.choose(m, k, n, multiprocessors)
    row_chunk, depth_chunk, splits = chosen.row_chunk, chosen.depth_chunk, chosen.splits
    left = _bytes(plan.piece_bytes(row_chunk, depth_chunk, plan.ROWS), out)
    right = _bytes(plan.piece_bytes(n, depth_chunk, plan.COLUMNS), out)
    parts = out.new_empty(splits, row_chunk, n) if splits > 1 else None
    launch = _Launches(device, multiprocessors)
    for first in range(0, k, depth_chunk):
        depth = min(depth_chunk, k - first)
        of_b = b[first : first + depth].t()
        for row in range(0, m, row_chunk):
            of_a = a[row : row + row_chunk, first : first + depth]
            launch.split(of_a, left, None if row else of_b, right)
            launch.product(
                left,
                right,
                depth,
                out[row : row + row_chunk],
                bias if first == 0 else None,
                parts,
                add=first > 0,
            )


def _bytes(count: int, like: Tensor) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device=like.device)


class _Launches:
    """Launches on the current stream of a device."""

    def __init__(self, device: int, multiprocessors: int) -> None:
        self._kernels = programs(device)
        self._stream = torch._C._cuda_getCurrentRawStream(device)
        self._multiprocessors = multiprocessors

    def split(self, a: Tensor, left: Tensor, b: Tensor | None, right: Tensor) -> None:
        """Take a [rows, depth] apart into `left` and b [columns, depth] into `right`."""
        depth_pieces = plan.tiles(a.shape[1], plan.DEPTH)
        a_blocks = plan.tiles(a.shape[0], plan.ROWS) * depth_pieces
        b_blocks = 0
        if b is not None:
            row_tiles = plan.tiles(b.shape[0], plan.COLUMNS) * (plan.COLUMNS // plan.ROWS)
            b_blocks = row_tiles * depth_pieces
        b = a if b is None else b
        self._kernels.split.launch(
            a_blocks + b_blocks,
            self._stream,
            a.data_ptr(),
            left.data_ptr(),
            a.shape[0],
            *a.stride(),
            b.data_ptr(),
            right.data_ptr(),
            b.shape[0],
            *b.stride(),
            a.shape[1],
            depth_pieces,
            a_blocks,
        )

    def product(
        self,
        left: Tensor,
        right: Tensor,
        depth: int,
        out: Tensor,
        bias: Tensor | None,
        parts: Tensor | None,
        *,
        add: bool,
    ) -> None:
        """Multiply what `split` made into out [m, n], or add it there.

        Args:
            left: of a.
            right: of b.
            depth: length of the summed dimension.
            out: rows contiguous.
            bias: added to every row.
            parts: [splits, at least m, n], contiguous: room for the results of as many ranges of
                the summed dimension; None for one range.
            add: whether to what is there.
        """
        m, n = out.shape
        depth_pieces = plan.tiles(depth, plan.DEPTH)
        splits = 1 if parts is None else min(parts.shape[0], depth_pieces)
        made = out if parts is None else parts
        bias_at = 0 if bias is None else bias.data_ptr()
        items = plan.tiles(m, plan.ROWS) * plan.tiles(n, plan.COLUMNS) * splits
        self._kernels.product.launch(
            min(items, self._kernels.product.resident_blocks),
            self._stream,
            left.data_ptr(),
            right.data_ptr(),
            made.data_ptr(),
            bias_at if parts is None else 0,
            m,
            n,
            depth_pieces,
            made.stride(-2),
            0 if parts is None else m * n,
            splits,
            add and parts is None,
        )
        if parts is not None:
            self._kernels.sum.launch(
                min(plan.tiles(m * n, plan.SUM_THREADS), _SUM_BLOCKS * self._multiprocessors),
                self._stream,
                made.data_ptr(),
                out.data_ptr(),
                bias_at,
                m,
                n,
                out.stride(0),
                splits,
                add,
            )
