"""Launch the LayerNorm kernels on contiguous CUDA tensors of the current device.

On a small tensor the time of a call is the time spent here, so the functions do the least that is
right: allocate, take addresses, enqueue on the current stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, empty_like

from hfai.kernels.layer_norm.programs import FEW_ROWS, Configuration, FewRowsBackward


def forward(
    configuration: Configuration,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    save_statistics: bool,
) -> tuple[Tensor, Tensor | None]:
    """Normalise the rows of x.

    Args:
        configuration: what fits these tensors.
        x: contiguous, [..., *shape], not empty.
        weight: contiguous, of `shape`, or None.
        bias: as weight.
        eps: added to the variance (or mean square).
        save_statistics: whether to return what the backward pass needs.

    Returns:
        y of x's shape, and fp32 statistics: [2, rows] (mean, 1/sqrt(variance + eps)), or [1, rows]
        (1/sqrt(mean square + eps)) for RMSNorm, or None.
    """
    rows = x.numel() // configuration.row_length
    y_dtype = configuration.y_dtype
    y = empty_like(x) if x.dtype is y_dtype else empty_like(x, dtype=y_dtype)
    statistics = None
    mean_pointer = rstd_pointer = 0
    if save_statistics:
        statistics = _scratch(x, (1 + configuration.centered, rows))
        mean_pointer = statistics.data_ptr()
        rstd_pointer = mean_pointer + 4 * rows * configuration.centered
    x_pointer = x.data_ptr()
    y_pointer = y.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    bias_pointer = 0 if bias is None else bias.data_ptr()
    aligned = (x_pointer | y_pointer | weight_pointer | bias_pointer) & 15 == 0
    program = configuration.forward(aligned, rows <= FEW_ROWS)
    program.kernel.launch(
        program.blocks(rows),
        torch._C._cuda_getCurrentRawStream(configuration.device),
        x_pointer,
        weight_pointer,
        bias_pointer,
        y_pointer,
        mean_pointer,
        rstd_pointer,
        eps,
        rows,
    )
    return y, statistics


def backward(
    configuration: Configuration,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    need_dx: bool,
    need_dweight: bool,
    need_dbias: bool,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return dx, dweight and dbias, each None where it is not needed.

    Args:
        configuration: as given to `forward`.
        dy: contiguous, of y's shape and dtype.
        x: as given to `forward`.
        weight: as given to `forward`.
        statistics: as returned by `forward`.
        need_dx: whether x needs a gradient.
        need_dweight: whether weight needs one.
        need_dbias: whether bias needs one.
    """
    row_length = configuration.row_length
    rows = x.numel() // row_length
    dx = empty_like(x) if need_dx else None
    dweight = _affine_gradient(configuration, x, weight) if need_dweight else None
    dbias = _affine_gradient(configuration, x, weight) if need_dbias else None
    x_pointer = x.data_ptr()
    dy_pointer = dy.data_ptr()
    dx_pointer = 0 if dx is None else dx.data_ptr()
    weight_pointer = 0 if weight is None else weight.data_ptr()
    mean_pointer = statistics.data_ptr()
    rstd_pointer = mean_pointer + 4 * rows * configuration.centered
    aligned = (x_pointer | dy_pointer | dx_pointer | weight_pointer) & 15 == 0
    dweight_pointer = 0 if dweight is None else dweight.data_ptr()
    dbias_pointer = 0 if dbias is None else dbias.data_ptr()
    stream = torch._C._cuda_getCurrentRawStream(configuration.device)
    program = configuration.backward(aligned, rows <= FEW_ROWS, need_dx, need_dweight, need_dbias)
    inputs = (dy_pointer, x_pointer, weight_pointer, mean_pointer, rstd_pointer, dx_pointer)
    if isinstance(program, FewRowsBackward):
        program.launch(stream, rows, *inputs, dweight_pointer, dbias_pointer)
        return dx, dweight, dbias
    groups = program.groups(rows)
    sums = need_dweight + need_dbias
    first = second = 0  # the groups' sums for dweight, if needed, and for dbias
    if sums:
        scratch = _scratch(x, (sums, groups, row_length))
        first = scratch.data_ptr()
        second = first + 4 * groups * row_length * (sums - 1)
    program.launch(stream, rows, groups, *inputs, first, second)
    if sums:
        program.add_partials.launch(
            -(-row_length // 32) * sums,
            stream,
            first,
            second,
            dweight_pointer or dbias_pointer,
            dbias_pointer or dweight_pointer,
            row_length,
            groups,
        )
    return dx, dweight, dbias


def _affine_gradient(configuration: Configuration, x: Tensor, weight: Tensor | None) -> Tensor:
    """Return room for a gradient of the shape and dtype that weight and bias share."""
    if weight is not None:
        return empty_like(weight)
    return x.new_empty(configuration.shape, dtype=configuration.affine_dtype)


def _scratch(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return uninitialised fp32 memory on x's device."""
    if x.dtype is torch.float32:
        return x.new_empty(shape)
    return x.new_empty(shape, dtype=torch.float32)
