"""The autograd node around torch's fused attention: from the input products to rows of the output.

One node takes the products whole and returns their gradients whole, so that neither q, k and v nor
their gradients are gathered or taken apart by nodes of their own. It can be differentiated twice,
and through the weights: then torch's plain operators do it, by the formula of `kernels.attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hfai.kernels.attention import Masking, formula
from hfai.kernels.attention.autograd import watched_backward
from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.mha import weights
from hfai.kernels.mha.cores import Core, Gradients, ThenOurs
from hfai.kernels.mha.projections import Layout


class Attend(Function):
    """rows, averaged weights = attention(products), by a core's forward and backward."""

    @staticmethod
    def forward(
        ctx: Any,
        core: Core,
        layout: Layout,
        bias: Tensor | None,
        causal: bool,
        need_weights: bool,
        *products: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the core and keep the products, its output and what it left for backward."""
        q, k, v = layout.split(products)
        out, kept = core.forward(q, k, v, bias, causal)
        rows = layout.join(out)
        ctx.save_for_backward(bias, rows, *kept, *products)
        ctx.constants = (core, layout, causal, len(products))
        ctx.set_materialize_grads(False)
        if not need_weights:
            return (rows,)
        return rows, weights.averaged(q, k, kept, bias, causal)

    @staticmethod
    def backward(
        ctx: Any, drows: Tensor | None, dweights: Tensor | None = None
    ) -> tuple[Tensor | None, ...]:
        """Run the core's backward, or torch's operators where it doesn't reach."""
        core, layout, causal, count = ctx.constants
        bias, rows, *saved = ctx.saved_tensors
        kept, products = tuple(saved[:-count]), saved[-count:]
        nothing: tuple[Tensor | None, ...] = (None,) * 5
        if drows is None and dweights is None:
            return (*nothing, *(None,) * count)
        if _is_plain_pass(drows, dweights):
            assert drows is not None
            q, k, v = layout.split(products)
            grad, out = layout.apart(drows.contiguous()), layout.apart(rows)
            if isinstance(core, ThenOurs):
                made = [
                    torch.empty_like(p, memory_format=torch.contiguous_format) for p in products
                ]
                dq, dk, dv = layout.split(made)
                core.backward(grad, q, k, v, bias, out, kept, causal, (dq, dk, dv))
            else:
                gradients = core.backward(grad, q, k, v, bias, out, kept, causal)
                made = _gather(gradients, products, layout)
            return (*nothing, *made)
        masking = Masking(causal=causal, attn_mask=bias)

        def recompute() -> tuple[Tensor, Tensor]:
            q, k, v = layout.split(products)
            out, of_heads = formula.attention(q, k, v, masking)
            return layout.join(out), of_heads

        needed = ctx.needs_input_grad[5:]
        found = watched_backward(recompute, tuple(products), needed, drows, dweights, "averaged")
        return (*nothing, *found)


# `apply` without the Python wrapper around it, whose functorch check the caller has made already.
apply_attend: Callable[..., tuple[Tensor, ...]] = super(Function, Attend).apply


def _is_plain_pass(drows: Tensor | None, dweights: Tensor | None) -> bool:
    """Return whether the core's backward gives these gradients in this pass."""
    return (
        drows is not None
        and dweights is None
        and not torch.is_grad_enabled()
        and type(drows) in PLAIN_TYPES
        and torch._C._has_storage(drows)
        and why_watched() is None
    )


def _gather(gradients: Gradients, products: list[Tensor], layout: Layout) -> list[Tensor]:
    """Return the products' gradients from those of q, k and v [B, length, H, D]."""
    if len(products) == 1:
        whole = _as_packed(gradients, products[0], layout)
        if whole is not None:
            return [whole]
    made = [torch.empty_like(p, memory_format=torch.contiguous_format) for p in products]
    for target, gradient in zip(layout.split(made), gradients, strict=True):
        target.copy_(gradient)
    return made


def _as_packed(gradients: Gradients, product: Tensor, layout: Layout) -> Tensor | None:
    """Return the tensor in which the three lie as q, k and v do in `product`, if there is one."""
    first, length, width = gradients[0], product.shape[1], product.shape[2]
    start = first.storage_offset()
    if first.untyped_storage().nbytes() < start * first.element_size() + product.nbytes:
        return None
    whole = first.as_strided(product.shape, (length * width, width, 1), start)
    for view, gradient in zip(layout.split([whole]), gradients, strict=True):
        if view.data_ptr() != gradient.data_ptr() or view.stride() != gradient.stride():
            return None
    return whole
