"""Launch the LayerNorm kernels on contiguous CUDA tensors.

A configuration (row length, types, what is wanted, device) is compiled once and kept by `programs`;
the functions here look it up, allocate the results and enqueue it on the current stream.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hfai.kernels.layer_norm import programs


def forward(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y_dtype: torch.dtype,
    centered: bool,
    save_statistics: bool,
) -> tuple[Tensor, Tensor | None]:
    """Normalise the rows of x.

    Args:
        x: contiguous, [..., *shape], fp32, fp16 or bf16.
        shape: of one row.
        weight: contiguous, of `shape`, or None.
        bias: as weight, and of its dtype.
        eps: added to the variance (or mean square).
        y_dtype: of the result.
        centered: True for LayerNorm, False for RMSNorm.
        save_statistics: whether to return what the backward pass needs.

    Returns:
        y of x's shape, and fp32 statistics: [2, rows] (mean, 1/sqrt(variance + eps)), or [1, rows]
        (1/sqrt(mean square + eps)) for RMSNorm, or None.
    """
    row_length = math.prod(shape)
    rows = x.numel() // row_length
    device = x.get_device()
    y = torch.empty_like(x, dtype=y_dtype)
    x_pointer, y_pointer = x.data_ptr(), y.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    bias_pointer = 0 if bias is None else bias.data_ptr()
    affine = bias if weight is None else weight
    program = programs.forward(
        device,
        row_length,
        x.dtype,
        y_dtype,
        None if affine is None else affine.dtype,
        weight is not None,
        bias is not None,
        centered,
        (x_pointer | y_pointer | weight_pointer | bias_pointer) % 16 == 0,
    )
    statistics = None
    mean_pointer = rstd_pointer = 0
    if save_statistics:
        statistics = x.new_empty((1 + centered, rows), dtype=torch.float32)
        mean_pointer = statistics.data_ptr()
        rstd_pointer = mean_pointer + 4 * rows * centered
    program.enqueue(
        torch._C._cuda_getCurrentRawStream(device),
        rows,
        x_pointer,
        weight_pointer,
        bias_pointer,
        y_pointer,
        mean_pointer,
        rstd_pointer,
        eps,
    )
    return y, statistics


def backward(
    dy: Tensor,
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    affine_dtype: torch.dtype | None,
    statistics: Tensor,
    centered: bool,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dweight and dbias, each None where it is not needed.

    Args:
        dy: contiguous, of x's shape.
        x: the contiguous input of `forward`.
        shape: of one row.
        weight: as given to `forward`.
        affine_dtype: dtype of weight and bias, None where there is neither.
        statistics: as returned by `forward`.
        centered: True for LayerNorm, False for RMSNorm.
        need_dx: whether x needs a gradient.
        need_dweight: whether weight needs one.
        need_dbias: whether bias needs one.
    """
    row_length = math.prod(shape)
    rows = x.numel() // row_length
    device = x.get_device()
    dx = torch.empty_like(x) if need_dx else None
    dweight = x.new_empty(shape, dtype=affine_dtype) if need_dweight else None
    dbias = x.new_empty(shape, dtype=affine_dtype) if need_dbias else None
    x_pointer, dy_pointer = x.data_ptr(), dy.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    dx_pointer = 0 if dx is None else dx.data_ptr()
    mean_pointer = statistics.data_ptr()
    rstd_pointer = mean_pointer + 4 * rows * centered
    program = programs.backward(
        device,
        row_length,
        x.dtype,
        dy.dtype,
        affine_dtype,
        weight is not None,
        centered,
        (x_pointer | dy_pointer | weight_pointer | dx_pointer) % 16 == 0,
        need_dx,
        need_dweight,
        need_dbias,
    )
    stream = torch._C._cuda_getCurrentRawStream(device)
    groups = program.groups(rows)
    totals = [total.data_ptr() for total in (dweight, dbias) if total is not None]
    partials = []
    if totals:
        scratch = x.new_empty((len(totals), groups, row_length), dtype=torch.float32)
        partials = [scratch.data_ptr() + 4 * groups * row_length * i for i in range(len(totals))]
    program.enqueue(
        stream,
        rows,
        groups,
        dy_pointer,
        x_pointer,
        weight_pointer,
        mean_pointer,
        rstd_pointer,
        dx_pointer,
        partials[0] if need_dweight else 0,
        partials[-1] if need_dbias else 0,
    )
    if totals:
        tiles = -(-row_length // 32)
        program.add_partials.launch(
            tiles * len(totals),
            stream,
            partials[0],
            partials[-1],
            totals[0],
            totals[-1],
            row_length,
            groups,
        )
    return dx, dweight, dbias
