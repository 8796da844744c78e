"""Which residual sums run here, and how such a call is made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.cuda import current_device

from hfai.kernels import jit
from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.residual_norm import launch, plan
from hfai.kernels.residual_norm.autograd import Outputs, apply_residual_norm, is_ready
from hfai.kernels.residual_norm.programs import Configuration, Types

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
# Elements of the sum below which torch's operators run: there it is the host that one waits for.
LEAST_ELEMENTS = 1 << 21

_configurations: dict[tuple[object, ...], Configuration] = {}
make_configuration: Callable[..., Configuration] = Configuration
"""Tests put one in its place whose kernels run on the CPU."""


def normalise_sum(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    dropout: float,
    *,
    z: bool = False,
    y: bool = True,
    half: bool = False,
) -> Outputs:
    """Return LayerNorm(residual + dropout(branch + branch_bias)), differentiably.

    Args:
        branch: [..., N], contiguous.
        branch_bias: [N], or None.
        residual: of branch's shape, contiguous.
        weight: LayerNorm's, [N], or None.
        bias: likewise.
        eps: added to the variance.
        dropout: the probability of dropping, below 1; 0 for none.
        z: whether the sum is wanted.
        y: whether its LayerNorm is; fp32 where autocast asks for that.
        half: whether that is wanted in branch's type as well.

    Raises:
        ValueError: `why_not_covered` has a reason against the call.
    """
    reason = why_not_covered(branch, branch_bias, residual, weight, bias, dropout)
    if reason is not None:
        raise ValueError(f"normalise_sum does not cover this call: {reason}")
    if branch.is_cuda and branch.get_device() != current_device():
        with torch.cuda.device(branch.get_device()):
            return normalise_sum(
                branch, branch_bias, residual, weight, bias, eps, dropout, z=z, y=y, half=half
            )
    configuration = _configure(branch, branch_bias, residual, weight, bias, dropout)
    parts = (branch, branch_bias, residual, weight, bias)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in parts):
        made = apply_residual_norm(*parts, configuration, eps, dropout, y, half)
        return Outputs(made[0] if z else None, made[1], made[2])
    found = launch.forward(
        configuration, *parts, eps, dropout, z=z, y=y, half=half, for_backward=False
    )
    return Outputs(found.z, found.y, found.half)


def why_not_covered(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> str | None:
    """Say what of a call is not covered, or None; arguments as for `normalise_sum`."""
    if branch.shape != residual.shape or branch.dim() < 2:
        return f"the sum of {tuple(branch.shape)} and {tuple(residual.shape)}"
    if branch.numel() < LEAST_ELEMENTS:
        return f"{branch.numel()} elements, fewer than {LEAST_ELEMENTS}"
    length = branch.shape[-1]
    if not plan.covers(length):
        return f"rows of {length}, no multiple of 8 up to {plan.MOST_COLUMNS}"
    if not 0.0 <= dropout < 1.0:
        return f"a dropout of {dropout}"
    parameters = [t for t in (weight, bias, branch_bias) if t is not None]
    for tensor in parameters:
        if tensor.shape != (length,) or tensor.dtype is not parameters[0].dtype:
            return "a parameter of another shape, or parameters of several types"
    for tensor in (branch, residual, *parameters):
        if type(tensor) not in PLAIN_TYPES or tensor.dtype not in DTYPES:
            return f"a {type(tensor).__name__} of {tensor.dtype}"
        if tensor.get_device() != branch.get_device():
            return "tensors on several devices"
        if tensor.is_nested or tensor.layout is not torch.strided or not is_ready(tensor):
            return "a tensor that is nested, sparse, not contiguous or not aligned"
    autocast = branch.is_cuda and torch.is_autocast_enabled("cuda")
    z = torch.promote_types(branch.dtype, residual.dtype)
    if parameters and not autocast and parameters[0].dtype is not z:
        return f"a sum of {z} and parameters of {parameters[0].dtype}"
    if branch.is_cuda:
        return why_watched() or jit.why_unavailable(branch.get_device())
    if make_configuration is Configuration:
        return f"the tensors are on {branch.device.type}, and the kernels are for CUDA"
    return why_watched()


def _configure(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Configuration:
    parameters = [t for t in (weight, bias, branch_bias) if t is not None]
    autocast = torch.is_autocast_enabled(branch.device.type)
    z = torch.promote_types(branch.dtype, residual.dtype)
    types = Types(
        branch.dtype,
        residual.dtype,
        torch.float32 if autocast else z,
        parameters[0].dtype if parameters else torch.float32,
    )
    key = (
        branch.get_device(),
        branch.shape[-1],
        types,
        weight is not None,
        bias is not None,
        branch_bias is not None,
        dropout > 0,
    )
    configuration = _configurations.get(key)
    if configuration is None:
        configuration = _configurations.setdefault(key, make_configuration(*key))
    return configuration
