"""Launch the products' kernels on CUDA tensors of the current device."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.products import plan


def multiply(a: Tensor, b: Tensor, out: Tensor, bias: Tensor | None = None) -> None:
    """Compute out [m, n] = a [m, k] b [k, n] + bias [n]."""
    (m, k), n = a.shape, b.shape[1]
    device = out.get_device()
    programs = _programs(device)
    stream = torch._C._cuda_getCurrentRawStream(device)
    chosen = plan.choose(m, k, n, jit.device_limits(device).multiprocessors)
    for first in range(0, k, chosen.depth_chunk):
        right = b[first : first + chosen.depth_chunk].t()
        right_pieces = _take_apart(programs, right, plan.COLUMNS, stream)
        depth_pieces = -(-right.shape[1] // plan.DEPTH)
        for row in range(0, m, chosen.row_chunk):
            left = a[row : row + chosen.row_chunk, first : first + chosen.depth_chunk]
            rows = left.shape[0]
            left_pieces = _take_apart(programs, left, plan.ROWS, stream)
            target = out[row : row + chosen.row_chunk]
            splits = min(chosen.splits, depth_pieces)
            made = target if splits == 1 else out.new_empty(splits, rows, n)
            added = bias.data_ptr() if bias is not None and first == 0 else 0
            tiles = -(-rows // plan.ROWS) * -(-n // plan.COLUMNS)
            programs.product.launch(
                min(tiles * splits, programs.product.resident_blocks),
                stream,
                left_pieces.data_ptr(),
                right_pieces.data_ptr(),
                made.data_ptr(),
                added if splits == 1 else 0,
                rows,
                n,
                depth_pieces,
                made.stride(-2),
                0 if splits == 1 else rows * n,
                splits,
                first > 0 and splits == 1,
            )
            if splits > 1:
                programs.sum.launch(
                    min(-(-rows * n // plan.SUM_THREADS), 8 * 132),
                    stream,
                    made.data_ptr(),
                    target.data_ptr(),
                    added,
                    rows,
                    n,
                    target.stride(0),
                    splits,
                    first > 0,
                )


class Programs:
    def __init__(self, device: int) -> None:
        def load(sources, name, threads, shared=0):
            constants = {"SPLIT_THREADS": plan.SPLIT_THREADS, "STAGES": plan.STAGES, "SUM_THREADS": plan.SUM_THREADS}
            text = jit.program_text(sources, constants, {})
            return jit.load(text, name, device, block=threads, shared_bytes=shared, architecture="sm_90a")

        self.split = load(["products/pieces.cuh", "products/split.cu"], "hfai_products_split", plan.SPLIT_THREADS)
        self.sum = load(["products/sum.cu"], "hfai_products_sum", plan.SUM_THREADS)
        self.product = load(
            ["warpgroup.cuh", "products/pieces.cuh", "products/product.cu"],
            "hfai_products_product", plan.THREADS, plan.SHARED_BYTES)


@functools.cache
def _programs(device: int) -> Programs:
    return Programs(device)


def _take_apart(programs, matrix: Tensor, row_tile: int, stream: int) -> Tensor:
    """Return a matrix [rows, k], of which one dimension is contiguous, as split.cu lays it out."""
    rows, depth = matrix.shape
    made = torch.empty(plan.pieces(rows, depth, row_tile), dtype=torch.uint8, device=matrix.device)
    programs.split.launch(
        made.numel() // plan.PIECE_PITCH,
        stream,
        matrix.data_ptr(),
        made.data_ptr(),
        rows,
        depth,
        matrix.stride(0),
        matrix.stride(1),
        -(-depth // plan.DEPTH),
    )
    return made
