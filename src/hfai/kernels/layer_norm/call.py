"""Which calls of LayerNorm and RMSNorm the kernels cover, and how such a call is made."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.nn import Parameter

from hfai.kernels import jit
from hfai.kernels.coverage import why_not_plain
from hfai.kernels.layer_norm import launch
from hfai.kernels.layer_norm.autograd import Normalise

HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF_DTYPES)
# Column indices are 32-bit in the kernels; rows and elements are counted in 64 bits.
MOST_COLUMNS = 2**31 - 2**20


def why_not_covered(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    centered: bool,
) -> str | None:
    """Return why this call goes to torch, or None where the kernels take it.

    Args:
        x: the input.
        shape: `normalized_shape`.
        weight: as it is now on the module.
        bias: likewise; always None for RMSNorm.
        centered: True for LayerNorm, False for RMSNorm.
    """
    reason = why_not_plain(x) or why_not_dtype(x.dtype) or jit.available()
    if reason is not None:
        return reason
    if x.shape[x.dim() - len(shape) :] != shape or x.dim() < len(shape):
        return f"the input's shape {tuple(x.shape)} does not end in {shape}"
    if x.numel() == 0:
        return "the input is empty"
    for affine in (weight, bias):
        if affine is not None:
            reason = _why_not_affine(affine, x, shape, centered)
            if reason is not None:
                return reason
    if weight is not None and bias is not None and weight.dtype != bias.dtype:
        return f"weight is {weight.dtype} and bias is {bias.dtype}"
    return None


def why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why inputs of this type go to torch, or None where the kernels take them."""
    return None if dtype in DTYPES else f"{dtype} is not among fp32, fp16 and bf16"


def _why_not_affine(
    affine: Tensor, x: Tensor, shape: tuple[int, ...], centered: bool
) -> str | None:
    if type(affine) is not Parameter and type(affine) is not Tensor:
        return f"a parameter is a {type(affine).__name__}, a tensor subclass"
    if affine.get_device() != x.get_device():
        return f"a parameter is on {affine.device} and the input on {x.device}"
    if affine.shape != shape or not affine.is_contiguous():
        return "a parameter is not a contiguous tensor of normalized_shape"
    if affine.dtype == x.dtype or (affine.dtype == torch.float32 and x.dtype in HALF_DTYPES):
        return None
    if affine.dtype in DTYPES and _autocasts(centered):
        return None
    return f"the input is {x.dtype} and a parameter {affine.dtype}"


def normalise(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centered: bool,
) -> Tensor:
    """Normalise the rows of x, differentiably; the call must be covered (`why_not_covered`).

    Returns:
        y of x's shape and dtype, or fp32 where autocast asks for that; the cast costs nothing.
    """
    y_dtype = torch.float32 if _autocasts(centered) else x.dtype
    if not x.is_contiguous():
        x = x.contiguous()
    if x.get_device() != torch.cuda.current_device():
        with torch.cuda.device(x.device):
            return _normalise(x, shape, weight, bias, eps, y_dtype, centered)
    return _normalise(x, shape, weight, bias, eps, y_dtype, centered)


def _normalise(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    y_dtype: torch.dtype,
    centered: bool,
) -> Tensor:
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return Normalise.call(x, weight, bias, shape, eps, y_dtype, centered)
    return launch.forward(x, shape, weight, bias, eps, y_dtype, centered, False)[0]


def _autocasts(centered: bool) -> bool:
    """Return whether autocast runs this call in fp32, by the list of the torch installed."""
    return torch.is_autocast_enabled("cuda") and _autocast_lists(centered)


@functools.cache
def _autocast_lists(centered: bool) -> bool:
    name = "aten::layer_norm" if centered else "aten::rms_norm"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
