"""The autograd node of LayerNorm and RMSNorm.

Written in the ctx style, which costs a sixth of `setup_context` in an eager call, and entered below
`Function.apply`'s Python wrapper, whose functorch check the caller has made already.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from hfai.kernels import coverage
from hfai.kernels.layer_norm import launch


class Normalise(Function):
    """y = (x - mean) / sqrt(variance + eps) * weight + bias, and its gradients by our kernels."""

    @classmethod
    def call(cls, *arguments: Any) -> Tensor:
        """`apply`, for a caller that knows that no functorch transform is active."""
        result: Tensor = super(Function, cls).apply(*arguments)  # type: ignore[misc]
        return result

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        shape: tuple[int, ...],
        eps: float,
        y_dtype: torch.dtype,
        centered: bool,
    ) -> Tensor:
        """Run the forward kernel and save x, weight and the fp32 statistics."""
        y, statistics = launch.forward(x, shape, weight, bias, eps, y_dtype, centered, True)
        ctx.save_for_backward(x, weight, statistics)
        affine = bias if weight is None else weight
        ctx.affine_dtype = None if affine is None else affine.dtype
        ctx.shape, ctx.eps, ctx.y_dtype, ctx.centered = shape, eps, y_dtype, centered
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Run the backward kernels, or torch's own where this pass is itself differentiated."""
        x, weight, statistics = ctx.saved_tensors
        needed = ctx.needs_input_grad[:3]
        if torch.is_grad_enabled() or coverage.why_not_plain(dy) is not None:
            return *_differentiable_backward(ctx, dy, x, weight, needed), None, None, None, None
        gradients = launch.backward(
            dy.contiguous(),
            x,
            ctx.shape,
            weight,
            ctx.affine_dtype,
            statistics,
            ctx.centered,
            *needed,
        )
        return *gradients, None, None, None, None


def _differentiable_backward(
    ctx: Any, dy: Tensor, x: Tensor, weight: Tensor | None, needed: tuple[bool, bool, bool]
) -> list[Tensor | None]:
    """The same gradients through torch's operators: double backward, vmap over gradients."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad():
        bias = None
        if needed[2]:  # its value does not enter the gradients
            bias = x.new_zeros(ctx.shape, dtype=ctx.affine_dtype).requires_grad_()

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(ctx.y_dtype)

        with torch.autocast(x.device.type, enabled=False):
            if ctx.centered:
                y = F.layer_norm(x.to(ctx.y_dtype), ctx.shape, cast(weight), cast(bias), ctx.eps)
            else:
                y = F.rms_norm(x.to(ctx.y_dtype), ctx.shape, cast(weight), ctx.eps)
        inputs = (x, weight, bias)
        wanted = [t for t, need in zip(inputs, needed, strict=True) if need and t is not None]
        gradients = iter(torch.autograd.grad(y, wanted, dy, create_graph=create_graph))
    return [next(gradients) if need else None for need in needed]
