"""Launch the kernels on contiguous, aligned tensors of the configuration's device."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hfai.kernels.residual_norm.programs import Configuration


class Forward(NamedTuple):
    """What the forward kernel wrote; None where it was not asked for.

    Attributes:
        z: residual + dropout(branch + branch_bias).
        y: LayerNorm(z).
        half: y in the branch's type.
        statistics: fp32 [2, rows]: mean and 1/sqrt(variance + eps).
        mask: uint8 [rows, row length / 8], a bit set for each element that dropout keeps.
    """

    z: Tensor | None
    y: Tensor | None
    half: Tensor | None
    statistics: Tensor | None
    mask: Tensor | None


def forward(
    configuration: Configuration,
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout: float,
    *,
    z: bool,
    y: bool,
    half: bool,
    for_backward: bool,
) -> Forward:
    """Run the forward kernel; the last four say what it is to write."""
    types = configuration.types
    rows = branch.numel() // configuration.row_length
    z_out = torch.empty_like(residual, dtype=types.z) if z or for_backward else None
    y_out = torch.empty_like(residual, dtype=types.y) if y else None
    half_out = torch.empty_like(branch) if half else None
    statistics = mask = seed = None
    if for_backward:
        statistics = residual.new_empty((2, rows), dtype=torch.float32)
    if configuration.dropout:
        # On the device, by torch's own generator: so it follows `manual_seed`, comes out the same
        # when a checkpointed region is run again, and differs from replay to replay of a graph.
        seed = branch.new_empty((1,), dtype=torch.int64).random_()
        if for_backward:
            mask = branch.new_empty((rows, configuration.row_length // 8), dtype=torch.uint8)
    keep = 1.0 - dropout
    loaded = configuration.forward()
    loaded.kernel.launch(
        -(-rows // loaded.layout.slots),
        configuration.stream,
        *map(_pointer, (branch, branch_bias, residual, weight, bias, seed)),
        *map(_pointer, (z_out, y_out, half_out, mask, statistics)),
        0 if statistics is None else statistics.data_ptr() + 4 * rows,
        round(keep * 2**32),
        1.0 / keep,
        float(eps),
        rows,
    )
    return Forward(z_out, y_out, half_out, statistics, mask)


def backward(
    configuration: Configuration,
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    z: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    mask: Tensor | None,
    dropout: float,
    needed: tuple[bool, bool, bool, bool, bool],
) -> list[Tensor | None]:
    """Return the gradients of branch, branch_bias, residual, weight and bias, None where unneeded.

    Args:
        configuration: as given to `forward`, as are `dropout` and `weight`.
        gradients: of z, y and half; None where there is none.
        z: as `forward` returned it, as are `statistics` and `mask`.
        weight: LayerNorm's.
        statistics: see z.
        mask: see z.
        dropout: the probability of dropping.
        needed: which gradients are wanted, in the order of the result.
    """
    types, length = configuration.types, configuration.row_length
    rows = z.numel() // length
    need_branch, need_branch_bias, need_residual, need_weight, need_bias = needed
    need_affine = need_weight or need_bias
    loaded = configuration.backward(need_affine, need_branch_bias)
    groups = min(loaded.kernel.resident_blocks, -(-rows // loaded.layout.slots))
    dbranch = torch.empty_like(z, dtype=types.branch) if need_branch else None
    dresidual = torch.empty_like(z, dtype=types.residual) if need_residual else None
    sums = 2 * need_affine + need_branch_bias
    partials = z.new_empty((sums, groups, length), dtype=torch.float32) if sums else None
    dz, dy, dhalf = gradients
    mean = statistics.data_ptr()
    loaded.kernel.launch(
        groups,
        configuration.stream,
        *map(_pointer, (dy, dhalf, dz, z, weight, mask)),
        mean,
        mean + 4 * rows,
        *map(_pointer, (dresidual, dbranch, partials)),
        1.0 / (1.0 - dropout),
        rows,
    )
    if partials is None:
        return [dbranch, None, dresidual, None, None]
    totals = [z.new_empty((length,), dtype=types.parameters) for _ in range(sums)]
    targets = [total.data_ptr() for total in totals] + [0, 0]
    configuration.add_partials().kernel.launch(
        -(-length // 32) * sums,
        configuration.stream,
        partials.data_ptr(),
        *targets[:3],
        groups,
    )
    dbranch_bias = totals.pop() if need_branch_bias else None
    dweight, dbias = totals if need_affine else (None, None)
    return [
        dbranch,
        dbranch_bias,
        dresidual,
        dweight if need_weight else None,
        dbias if need_bias else None,
    ]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
