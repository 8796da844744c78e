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
# Elements of the sum below which torch's operators run: there it is the host that one waits for,
# and it takes longer over a node in Python. On an H200 layers of 32x128x768 took 1.10 of the time
# with their sums here, layers of 32x512x1024 0.92 (benchmarks/layers.py).
LEAST_ELEMENTS = 1 << 23

# None: calls like this are not covered.
_configurations: dict[tuple[object, ...], Configuration | None] = {}
make_configuration: Callable[..., Configuration] = Configuration
"""Tests put one in its place whose kernels run on the CPU."""


def is_large(residual: Tensor) -> bool:
    """Return whether a sum of this size runs here, if nothing else is against it."""
    return residual.numel() >= LEAST_ELEMENTS


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
) -> Outputs | None:
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

    Returns:
        What was wanted; None where the kernels do not cover the call (`why_not_covered`).
    """
    if branch.numel() < LEAST_ELEMENTS or not 0.0 <= dropout < 1.0:
        return None
    parts = (branch, branch_bias, residual, weight, bias)
    device = branch.get_device()
    key = (
        device,
        branch.shape[-1:],
        dropout > 0.0,
        torch.is_autocast_enabled(branch.device.type),
        *((None if t is None else (type(t), t.dtype, t.shape[-1:])) for t in parts),
    )
    try:
        configuration = _configurations[key]
    except KeyError:
        if why_watched() is not None or why_not_fitting(*parts) is not None:
            return None  # says nothing of the next call with this key
        configuration = _configure(*parts, dropout)
        configuration = _configurations.setdefault(key, configuration)
    if configuration is None or why_watched() is not None or why_not_fitting(*parts) is not None:
        return None
    if device >= 0 and device != current_device():
        with torch.cuda.device(device):
            return _run(configuration, parts, float(eps), dropout, z, y, half)
    return _run(configuration, parts, float(eps), dropout, z, y, half)


Parts = tuple[Tensor, Tensor | None, Tensor, Tensor | None, Tensor | None]


def _run(
    configuration: Configuration,
    parts: Parts,
    eps: float,
    dropout: float,
    z: bool,
    y: bool,
    half: bool,
) -> Outputs:
    branch, branch_bias, residual, weight, bias = parts
    if torch.is_grad_enabled() and (
        branch.requires_grad
        or residual.requires_grad
        or any(t is not None and t.requires_grad for t in (branch_bias, weight, bias))
    ):
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
    if branch.numel() < LEAST_ELEMENTS:
        return f"{branch.numel()} elements, fewer than {LEAST_ELEMENTS}"
    if not 0.0 <= dropout < 1.0:
        return f"a dropout of {dropout}"
    parts = (branch, branch_bias, residual, weight, bias)
    return _why_not_configured(*parts) or why_not_fitting(*parts) or why_watched()


def why_not_fitting(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> str | None:
    """Say what of this call's tensors does not fit, types and lengths aside, or None."""
    if branch.is_nested or residual.is_nested or branch.shape != residual.shape:
        return f"the sum of {tuple(branch.shape)} and {tuple(residual.shape)}"
    device = branch.get_device()
    for tensor in (branch, residual, weight, bias, branch_bias):
        if tensor is None:
            continue
        if tensor.get_device() != device:
            return "tensors on several devices"
        if tensor.layout is not torch.strided or not is_ready(tensor):
            return "a tensor that is sparse, not contiguous or not aligned"
    return None


def _why_not_configured(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
) -> str | None:
    """Say what of a call's types and lengths is not covered, or None."""
    length = branch.shape[-1] if branch.dim() else 0
    if branch.dim() < 2 or not plan.covers(length):
        return f"rows of {length}, no multiple of 8 up to {plan.MOST_COLUMNS}"
    parameters = [t for t in (weight, bias, branch_bias) if t is not None]
    for tensor in parameters:
        if tensor.shape != (length,) or tensor.dtype is not parameters[0].dtype:
            return "a parameter of another shape, or parameters of several types"
    for tensor in (branch, residual, *parameters):
        if type(tensor) not in PLAIN_TYPES or tensor.dtype not in DTYPES:
            return f"a {type(tensor).__name__} of {tensor.dtype}"
    autocast = branch.is_cuda and torch.is_autocast_enabled("cuda")
    z = torch.promote_types(branch.dtype, residual.dtype)
    if parameters and not autocast and parameters[0].dtype is not z:
        return f"a sum of {z} and parameters of {parameters[0].dtype}"
    if branch.is_cuda:
        return jit.why_unavailable(branch.get_device())
    if make_configuration is Configuration:
        return f"the tensors are on {branch.device.type}, and the kernels are for CUDA"
    return None


def _configure(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dropout: float,
) -> Configuration | None:
    """Return the configuration of calls like this one, or None where they are not covered."""
    if _why_not_configured(branch, branch_bias, residual, weight, bias) is not None:
        return None
    parameters = [t for t in (weight, bias, branch_bias) if t is not None]
    autocast = torch.is_autocast_enabled(branch.device.type)
    z = torch.promote_types(branch.dtype, residual.dtype)
    types = Types(
        branch.dtype,
        residual.dtype,
        torch.float32 if autocast else z,
        parameters[0].dtype if parameters else torch.float32,
    )
    return make_configuration(
        branch.get_device(),
        branch.shape[-1],
        types,
        weight is not None,
        bias is not None,
        branch_bias is not None,
        dropout > 0,
    )
