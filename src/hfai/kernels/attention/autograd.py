"""The autograd nodes of attention: from separate q, k, v, and from one packed input product.

In the ctx style, which costs a sixth of `setup_context` in an eager call, and entered below
`Function.apply`'s Python wrapper, as all operators here: the caller has asked `call.supports`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function
from torch.cuda import current_device

from hfai.kernels.attention import formula, launch
from hfai.kernels.attention.call import unpack
from hfai.kernels.attention.masking import Masking
from hfai.kernels.coverage import why_not_plain, why_watched

Weights = Literal["averaged", "heads"]
Gradients = tuple[Tensor | None, ...]

_NO_MASKING = Masking()


def attention(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking = _NO_MASKING, weights: Weights | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute softmax(scale * q k^T + masks) v, differentiably; `supports` must have said None.

    Args:
        q: [batch, rows, heads, head_dim]; any view whose rows start on 16 bytes.
        k: [batch, keys, heads, head_dim], likewise.
        v: as k.
        masking: masks and scale.
        weights: also return the softmax, of each head or averaged over the heads.

    Returns:
        out [batch, rows, heads, head_dim], dense in q's order of batch and rows; and the weights
        [batch, rows, keys] ("averaged") or [batch, heads, rows, keys] ("heads") in q's dtype, or
        None. A gradient into the weights is computed by torch's operators.
    """
    if q.is_cuda and q.get_device() != current_device():
        with torch.cuda.device(q.get_device()):
            made = apply_attention(q, k, v, masking, weights)
    else:
        made = apply_attention(q, k, v, masking, weights)
    return made[0], made[1] if weights else None


def packed_attention(
    qkv: Tensor,
    heads: int,
    masking: Masking = _NO_MASKING,
    weights: Weights | None = None,
    *,
    batch_first: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Self-attention straight from the input product; `supports_packed` must have said None.

    Args:
        qkv: [batch, rows, 3 * heads * head_dim], q before k before v as in MultiheadAttention, or
            [rows, batch, ...] without `batch_first`. Its gradient is one tensor of its shape.
        heads: number of heads.
        masking: masks and scale.
        weights: as `attention` takes it.
        batch_first: whether the batch is the first dimension.

    Returns:
        out [batch, rows, heads * head_dim], or [rows, batch, ...], contiguous; and the weights as
        `attention` returns them.
    """
    if qkv.is_cuda and qkv.get_device() != current_device():
        with torch.cuda.device(qkv.get_device()):
            made = apply_packed_attention(qkv, heads, batch_first, masking, weights)
    else:
        made = apply_packed_attention(qkv, heads, batch_first, masking, weights)
    return made[0], made[1] if weights else None


class Attention(Function):
    """out, weights = attention(q, k, v), and its gradients by our kernels."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, masking: Masking, weights: Weights | None
    ) -> tuple[Tensor, ...]:
        """Run the forward kernel and save q, k, v and the fp32 logsumexp."""
        made, lse = _forward(q, k, v, masking, weights, None)
        kept = made[0] if any(ctx.needs_input_grad) and launch.needs_out(q, k, masking) else None
        ctx.save_for_backward(q, k, v, kept, lse, masking.attn_mask, masking.key_padding_mask)
        ctx.constants = (replace(masking, attn_mask=None, key_padding_mask=None), weights)
        ctx.set_materialize_grads(False)
        return made

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None = None) -> Gradients:
        """Run the backward kernel, or torch's operators where it doesn't reach."""
        q, k, v, out, lse, attn_mask, key_padding_mask = ctx.saved_tensors
        masking, weights = ctx.constants
        masking = replace(masking, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
        needed = ctx.needs_input_grad[:3]
        if dout is None and dweights is None:
            return None, None, None, None, None
        if _is_ours(dout, dweights):
            assert dout is not None
            made = launch.attention_backward(dout, q, k, v, out, lse, masking)
            gradients: Gradients = tuple(
                gradient if need else None for gradient, need in zip(made, needed, strict=True)
            )
        else:
            gradients = watched_backward(
                lambda: formula.attention(q, k, v, masking),
                (q, k, v),
                needed,
                dout,
                dweights,
                weights,
            )
        return (*gradients, None, None)


class PackedAttention(Function):
    """The same from one product and into one gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: Tensor,
        heads: int,
        batch_first: bool,
        masking: Masking,
        weights: Weights | None,
    ) -> tuple[Tensor, ...]:
        """Run the forward kernel on views of the product, which is what is saved."""
        q, k, v = unpack(qkv, heads, batch_first)
        first, second, width = qkv.shape
        flat = qkv.new_empty((first, second, width // 3))
        made, lse = _forward(q, k, v, masking, weights, _as_heads(flat, heads, batch_first))
        kept = flat if ctx.needs_input_grad[0] and launch.needs_out(q, k, masking) else None
        ctx.save_for_backward(qkv, kept, lse, masking.attn_mask, masking.key_padding_mask)
        without = replace(masking, attn_mask=None, key_padding_mask=None)
        ctx.constants = (heads, batch_first, without, weights)
        ctx.set_materialize_grads(False)
        return (flat, *made[1:])

    @staticmethod
    def backward(ctx: Any, dout: Tensor | None, dweights: Tensor | None = None) -> Gradients:
        """Run the backward kernel into one gradient, or torch's operators."""
        qkv, out, lse, attn_mask, key_padding_mask = ctx.saved_tensors
        heads, batch_first, masking, weights = ctx.constants
        masking = replace(masking, attn_mask=attn_mask, key_padding_mask=key_padding_mask)
        if dout is None and dweights is None:
            return None, None, None, None, None
        if _is_ours(dout, dweights):
            assert dout is not None
            dqkv = torch.empty_like(qkv, memory_format=torch.contiguous_format)
            launch.attention_backward(
                _as_heads(dout.contiguous(), heads, batch_first),
                *unpack(qkv, heads, batch_first),
                None if out is None else _as_heads(out, heads, batch_first),
                lse,
                masking,
                unpack(dqkv, heads, batch_first),
            )
            return dqkv, None, None, None, None

        def recompute() -> tuple[Tensor, Tensor]:
            made, of_heads = formula.attention(*unpack(qkv, heads, batch_first), masking)
            flat = made.flatten(2)
            return flat if batch_first else flat.transpose(0, 1), of_heads

        (gradient,) = watched_backward(recompute, (qkv,), (True,), dout, dweights, weights)
        return gradient, None, None, None, None


# `apply` without the Python wrapper around it.
apply_attention: Callable[..., tuple[Tensor, ...]] = super(Function, Attention).apply
apply_packed_attention: Callable[..., tuple[Tensor, ...]] = super(Function, PackedAttention).apply


def watched_backward(
    recompute: Callable[[], tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, ...],
    needed: tuple[bool, ...],
    dout: Tensor | None,
    dweights: Tensor | None,
    weights: Weights | None,
) -> Gradients:
    """The same gradients through torch's operators: double backward, gradients into the weights."""
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(inputs[0].device.type, enabled=False):
        out, of_heads = recompute()
        pairs = [(out, dout)] if dout is not None else []
        if dweights is not None:
            returned = of_heads.mean(1) if weights == "averaged" else of_heads
            pairs.append((returned, dweights))
        # The weights hang on q and k alone, of which none may ask for a gradient.
        pairs = [(output, gradient) for output, gradient in pairs if output.requires_grad]
        if not pairs:
            return (None,) * len(needed)
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                [tensor for tensor, need in zip(inputs, needed, strict=True) if need],
                [gradient for _, gradient in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        )
    return tuple(next(found) if need else None for need in needed)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, weights: Weights | None, out: Tensor | None
) -> tuple[tuple[Tensor, ...], Tensor]:
    out, lse = launch.attention_forward(q, k, v, masking, out)
    if weights is None:
        return (out,), lse
    return (out, launch.attention_weights(q, k, lse, masking, weights == "averaged")), lse


def _is_ours(dout: Tensor | None, dweights: Tensor | None) -> bool:
    """Return whether the backward kernel gives these gradients in this pass."""
    return (
        dout is not None
        and dweights is None
        and not torch.is_grad_enabled()
        and why_watched() is None
        and why_not_plain(dout) is None
    )


def _as_heads(flat: Tensor, heads: int, batch_first: bool) -> Tensor:
    first, second, width = flat.shape
    view = flat.view(first, second, heads, width // heads)
    return view if batch_first else view.transpose(0, 1)
