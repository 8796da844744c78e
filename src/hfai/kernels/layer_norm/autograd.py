"""The differentiable call of LayerNorm and RMSNorm, and its autograd node.

There are two that do the same work with the same kernels: the one written here, and node.cpp,
which takes over as soon as it is compiled (`attach`). This one is in the ctx style, which costs a
sixth of `setup_context` in an eager call, and is entered below `Function.apply`'s Python wrapper,
whose functorch check the caller has made already.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.cuda import current_device
from torch.nn import functional as F

from hfai.kernels.coverage import dense, is_dense, why_not_plain, why_watched
from hfai.kernels.extension import Extension
from hfai.kernels.layer_norm import launch
from hfai.kernels.layer_norm.programs import FEW_ROWS, Configuration


class Normalise(Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, and its gradients by our kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
        configuration: Configuration,
    ) -> Tensor:
        """Run the forward kernel and save x, weight and the fp32 statistics."""
        y, statistics = launch.forward(configuration, x, weight, bias, eps, True)
        ctx.save_for_backward(x, weight, statistics)
        ctx.constants = (configuration, eps)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward kernels, or torch's own where this pass is itself watched."""
        x, weight, statistics = ctx.saved_tensors
        configuration, eps = ctx.constants
        need_dx, need_dweight, need_dbias, _, _ = ctx.needs_input_grad
        if (
            torch.is_grad_enabled()
            or why_watched()
            or why_not_plain(dy)
            or not is_as_saved(configuration, dy, x, weight, statistics)
        ):
            dx, dweight, dbias = watched_backward(
                configuration, eps, dy, x, weight, need_dx, need_dweight, need_dbias
            )
        else:
            dx, dweight, dbias = launch.backward(
                configuration,
                dense(dy),
                dense(x),
                None if weight is None else dense(weight),
                dense(statistics),
                need_dx,
                need_dweight,
                need_dbias,
            )
        return dx, dweight, dbias, None, None


# `Normalise.apply` without the Python wrapper around it.
apply_normalise: Callable[..., Tensor] = super(Function, Normalise).apply

EXTENSION = Extension("layer_norm/node.cpp", "node")


def attach(configuration: Configuration) -> None:
    """Give a configuration its `run`: from Python at once, from node.cpp when that is there."""
    configuration.run = functools.partial(run, configuration)

    def take_over(module: ModuleType) -> None:
        configuration.run = functools.partial(module.normalise, node_call(module, configuration))

    EXTENSION.request(take_over)


def node_call(module: ModuleType, configuration: Configuration) -> object:
    """Return what node.cpp's `normalise` takes for calls of this configuration."""
    return module.make_call(
        configuration,
        watched_backward,
        configuration.device,
        configuration.row_length,
        FEW_ROWS,
        configuration.has_weight,
        configuration.has_bias,
        configuration.centered,
        configuration.x_dtype,
        configuration.y_dtype,
        configuration.affine_dtype,
        configuration.shape,
    )


def run(
    configuration: Configuration,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor | None:
    """Normalise the rows of x, differentiably where that is called for; None where they don't fit.

    The tensors' types, x's device and their dtypes are the configuration's.
    """
    if not fits(configuration, x, weight, bias):
        return None
    x = dense(x)
    if configuration.device != current_device():
        with torch.cuda.device(configuration.device):
            return _run(configuration, x, weight, bias, eps)
    return _run(configuration, x, weight, bias, eps)


def fits(
    configuration: Configuration, x: Tensor, weight: Tensor | None, bias: Tensor | None
) -> bool:
    """Return whether shapes and layouts are what the kernels take (node.cpp asks the same)."""
    shape = configuration.shape
    return (
        not x.is_nested
        and x.layout is torch.strided
        and x.shape[-len(shape) :] == shape
        and x.numel() != 0
        and all(
            affine is None
            or (
                affine.shape == shape
                and affine.get_device() == configuration.device
                and is_dense(affine)
            )
            for affine in (weight, bias)
        )
    )


def _run(
    configuration: Configuration,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    if torch.is_grad_enabled() and (
        x.requires_grad
        or (weight is not None and weight.requires_grad)
        or (bias is not None and bias.requires_grad)
    ):
        return apply_normalise(x, weight, bias, eps, configuration)
    return launch.forward(configuration, x, weight, bias, eps, False)[0]


def is_as_saved(
    configuration: Configuration, dy: Tensor, x: Tensor, weight: Tensor | None, statistics: Tensor
) -> bool:
    """Return whether what saved-tensor hooks gave back is what was saved, strides aside.

    Hooks that break the rest of torch's contract are to meet torch's own checks, not a kernel.
    """

    def same(tensor: Tensor | None, dtype: torch.dtype | None, shape: tuple[int, ...]) -> bool:
        return (
            tensor is not None
            and tensor.dtype == dtype
            and tensor.shape == shape
            and tensor.get_device() == configuration.device
            and why_not_plain(tensor) is None
        )

    rows = dy.numel() // configuration.row_length
    return (
        same(x, configuration.x_dtype, dy.shape)
        and same(statistics, torch.float32, (1 + configuration.centered, rows))
        and (
            same(weight, configuration.affine_dtype, configuration.shape)
            if configuration.has_weight
            else weight is None
        )
    )


def watched_backward(
    configuration: Configuration,
    eps: float,
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    *needed: bool,
) -> list[Tensor | None]:
    """The same gradients through torch's operators: double backward, vmap over gradients."""
    create_graph = torch.is_grad_enabled()
    shape = configuration.shape
    # As the kernels compute: in fp32 where any of the types is.
    dtype = torch.promote_types(configuration.y_dtype, configuration.affine_dtype or x.dtype)
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        # Aliases: x may itself be made with this weight (one norm applied twice), and the paths
        # through x's own history are the caller's to follow.
        x, weight = x.view_as(x), None if weight is None else weight.view_as(weight)
        bias = None
        if needed[2]:  # its value does not enter the gradients
            bias = x.new_zeros(shape, dtype=configuration.affine_dtype).requires_grad_()

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(dtype)

        if configuration.centered:
            y = F.layer_norm(x.to(dtype), shape, cast(weight), cast(bias), eps)
        else:
            y = F.rms_norm(x.to(dtype), shape, cast(weight), eps)
        inputs = (x, weight, bias)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
        gradients = iter(torch.autograd.grad(y, wanted, dy.to(dtype), create_graph=create_graph))
    return [next(gradients) if need else None for need in needed]
