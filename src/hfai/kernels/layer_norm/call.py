"""Which calls of LayerNorm and RMSNorm the kernels cover, and how such a call is made.

What types, the input's device and `normalized_shape` decide is looked up in a table of
configurations; a miss asks `why_not_configured` and remembers the answer. The rest (modes, an input
or a parameter of the wrong shape or layout) is checked every time, by what runs the call.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor, is_autocast_enabled

from hfai.kernels import jit
from hfai.kernels.coverage import PLAIN_TYPES, why_not_plain, why_watched
from hfai.kernels.layer_norm.autograd import attach
from hfai.kernels.layer_norm.programs import Configuration

HALF_DTYPES = (torch.float16, torch.bfloat16)
DTYPES = (torch.float32, *HALF_DTYPES)
# Column indices are 32-bit in the kernels; rows and elements are counted in 64 bits.
MOST_COLUMNS = 2**31 - 2**20

# None: calls like this are torch's.
_configurations: dict[tuple[object, ...], Configuration | None] = {}


def normalise(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float | None,
    centered: bool,
) -> Tensor | None:
    """Normalise the rows of x by our kernels, differentiably, or return None: torch's turn.

    Args:
        x: [..., *shape].
        shape: `normalized_shape`.
        weight: of `shape`, or None.
        bias: of `shape`, or None; always None for RMSNorm.
        eps: added under the square root; None (RMSNorm only) for fp32's machine epsilon.
        centered: True for LayerNorm, False for RMSNorm.

    Returns:
        y of x's shape and dtype, or fp32 where autocast asks for that; the cast costs nothing.
        None where the kernels do not cover the call.
    """
    if type(x) not in PLAIN_TYPES or not x.is_cuda:  # before anything that torch.fx would record
        return None
    autocast = is_autocast_enabled("cuda")
    key = (
        x.dtype,
        x.get_device(),
        shape,
        None if weight is None else (type(weight), weight.dtype),
        None if bias is None else (type(bias), bias.dtype),
        eps is None,
        centered,
        autocast,
    )
    try:
        configuration = _configurations[key]
    except KeyError:
        if why_watched() or why_not_plain(x) or why_not_fitting(x, shape, weight, bias):
            return None  # says nothing of the next call with this key
        configuration = _configurations[key] = _configure(
            x, shape, weight, bias, eps is None, centered, autocast
        )
    if configuration is None or why_watched() is not None:
        return None
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    return configuration.run(x, weight, bias, eps)


def is_mix_that_torch_refuses(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> bool:
    """Return whether torch's LayerNorm takes these types on the CPU but not on CUDA.

    Our kernels take them, so what a kernel leaves to torch (an empty batch, vmap) must work too.
    """
    affine = bias if weight is None else weight
    return (
        isinstance(x, Tensor)  # torch.fx calls with something else
        and x.is_cuda
        and affine is not None
        and affine.dtype == torch.float32
        and x.dtype in HALF_DTYPES
        and not is_autocast_enabled("cuda")
    )


def _why_not_dtype(dtype: torch.dtype) -> str | None:
    """Return why inputs of this type go to torch, or None where the kernels take them."""
    return None if dtype in DTYPES else f"{dtype} is not among fp32, fp16 and bf16"


def _configure(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    default_eps: bool,
    centered: bool,
    autocast: bool,
) -> Configuration | None:
    """Return the configuration of calls like this one, or None where they are torch's."""
    if why_not_configured(x, shape, weight, bias, default_eps, centered, autocast) is not None:
        return None
    affine = bias if weight is None else weight
    to_fp32 = autocast and _autocast_lists(centered)
    configuration = Configuration(
        device=x.get_device(),
        shape=shape,
        row_length=math.prod(shape),
        x_dtype=x.dtype,
        y_dtype=torch.float32 if to_fp32 else x.dtype,
        affine_dtype=None if affine is None else affine.dtype,
        has_weight=weight is not None,
        has_bias=bias is not None,
        centered=centered,
    )
    attach(configuration)
    return configuration


def why_not_configured(
    x: Tensor,
    shape: tuple[int, ...],
    weight: Tensor | None,
    bias: Tensor | None,
    default_eps: bool,
    centered: bool,
    autocast: bool,
) -> str | None:
    """Say what in types, devices and the parameters' shapes is not covered, or None.

    Args:
        x: an input; only its type, layout, dtype and device count.
        shape: `normalized_shape`.
        weight: the parameter as it is now, or None.
        bias: likewise.
        default_eps: whether eps is None.
        centered: True for LayerNorm, False for RMSNorm.
        autocast: whether autocast is on for CUDA.
    """
    reason = why_not_plain(x) or _why_not_dtype(x.dtype) or jit.why_unavailable(x.get_device())
    if reason is not None:
        return reason
    if not shape:
        return "normalized_shape has no dimensions"
    if not 0 < math.prod(shape) <= MOST_COLUMNS:
        return f"rows of {math.prod(shape)} elements"
    affines = [affine for affine in (weight, bias) if affine is not None]
    for affine in affines:
        if type(affine) not in PLAIN_TYPES:
            return f"a parameter is a {type(affine).__name__}, a tensor subclass"
        if affine.dtype != affines[0].dtype:
            return f"weight is {affines[0].dtype} and bias is {affine.dtype}"
    reason = why_not_fitting(x, shape, weight, bias)
    if reason is not None:
        return reason
    if affines and affines[0].dtype != x.dtype:
        mixed = f"the input is {x.dtype} and the parameters {affines[0].dtype}"
        if autocast and _autocast_lists(centered):
            return _why_not_dtype(affines[0].dtype)
        if not (affines[0].dtype == torch.float32 and x.dtype in HALF_DTYPES):
            return mixed
        if default_eps:  # torch's default then depends on which of its paths is taken
            return f"{mixed}, with eps=None"
    return None


def why_not_fitting(
    x: Tensor, shape: tuple[int, ...], weight: Tensor | None, bias: Tensor | None
) -> str | None:
    """Say what of this call's tensors does not fit, types aside, or None."""
    if x.is_nested or x.layout is not torch.strided:
        return "the tensor is nested or sparse"
    for affine in (weight, bias):
        if affine is None:
            continue
        if affine.get_device() != x.get_device():
            return f"a parameter is on {affine.device} and the input on {x.device}"
        if affine.shape != shape:
            return f"a parameter has shape {tuple(affine.shape)}, not normalized_shape {shape}"
    return None


@functools.cache
def _autocast_lists(centered: bool) -> bool:
    """Return whether the installed torch's autocast runs this operator in fp32."""
    name = "aten::layer_norm" if centered else "aten::rms_norm"
    return torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCUDA")
