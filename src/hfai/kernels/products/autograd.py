"""`torch.nn.functional.linear` with all three of its products made by these kernels.

The forward product and the two of backward are each torch's where that is faster or where the
kernels don't reach. Written in the ctx style and entered below `Function.apply`'s Python wrapper,
as all operators here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.cuda import current_device
from torch.nn import functional as F

from hfai.kernels.attention.precision import allows_tf32
from hfai.kernels.coverage import why_watched
from hfai.kernels.products.call import multiply, why_not, why_not_size, why_not_tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b as `torch.nn.functional.linear` does, in fp32's accuracy where that asks it.

    Args:
        x: [..., k].
        weight: [n, k].
        bias: [n] or None.
    """
    if torch.compiler.is_compiling() or why_not_linear(x, weight, bias) is not None:
        return F.linear(x, weight, bias)
    return apply_linear(x, weight, bias)


def why_not_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Say why a call is torch's, or None."""
    if allows_tf32() or torch.is_autocast_enabled("cuda"):
        return "TF32 or autocast is on: torch's products are faster"
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        reason = why_not_tensor(tensor)
        if reason is not None:
            return reason
        if tensor.get_device() != current_device():
            return "a tensor is not on the current device"
    if weight.dim() != 2 or x.dim() < 2 or x.shape[-1] != weight.shape[1] or not x.numel():
        return "shapes that are torch's to judge"
    if bias is not None and (bias.shape != weight.shape[:1] or not bias.is_contiguous()):
        return "a bias whose shape or strides are torch's to judge"
    n, k = weight.shape
    return why_watched() or why_not_size(x.numel() // k, k, n, x.get_device())


def product(a: Tensor, b: Tensor) -> Tensor:
    """Return a b of two matrices, by the kernels or by torch."""
    out = a.new_empty(a.shape[0], b.shape[1])
    if why_not(a, b, out) is None:
        multiply(a, b, out)
        return out
    return torch.mm(a, b, out=out)


class Linear(Function):
    """y = x Wᵀ + b and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply, and keep of the operands what the wanted gradients are made of."""
        n, k = weight.shape
        y = x.new_empty(*x.shape[:-1], n)
        multiply(x.reshape(-1, k), weight.t(), y.view(-1, n), bias)
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.set_materialize_grads(False)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Multiply by each operand; by torch's operators where this pass is itself watched."""
        if dy is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        with torch.autocast("cuda", enabled=False):
            rows = dy.reshape(-1, dy.shape[-1])
            by = torch.mm if torch.is_grad_enabled() or why_watched() is not None else product
            return (
                by(rows, weight).view(*dy.shape[:-1], -1) if needs_x else None,
                by(rows.t(), x.reshape(-1, x.shape[-1])) if needs_weight else None,
                rows.sum(0) if needs_bias else None,
            )


# `apply` without the Python wrapper around it, whose functorch check the caller has made already.
apply_linear: Callable[..., Tensor] = super(Function, Linear).apply
