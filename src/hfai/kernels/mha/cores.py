"""torch's fused attention operators for q, k and v of any strides, each behind the same two calls.

They are what `torch.nn.functional.scaled_dot_product_attention` ends in. We call them by name
because that function keeps to itself what a backward of ours needs (above all the logarithms of the
row sums, from which the weights can be written on the side), and because their own autograd nodes
refuse to be differentiated twice.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels.attention import Masking, attention_backward

Kept = tuple[Tensor, ...]
"""What a forward leaves for its backward besides q, k, v, bias and out.

First of all the natural logarithm of each row's sum of exponentials, fp32, [B, H, L] at least.
"""
Gradients = tuple[Tensor, Tensor, Tensor]

_aten = torch.ops.aten


class Core(Protocol):
    """One way to compute softmax(q kᵀ / √D + bias) v and its gradients.

    q and out are [B, L, H, D], k and v [B, S, H, D], of any strides whose last is 1; the bias is
    None or broadcasts to [B, H, L, S].
    """

    name: str

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """Return the output, and what backward needs."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        """Return the gradients of q, k and v."""


class Flash:
    """FlashAttention 2: half precision, no bias."""

    name = "torch's flash attention"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """See `Core`."""
        made = _aten._scaled_dot_product_flash_attention.default(*_t(q, k, v), 0.0, causal, False)
        return made[0].transpose(1, 2), (made[1], made[6], made[7])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        """See `Core`."""
        lse, seed, offset = kept
        made = _aten._scaled_dot_product_flash_attention_backward.default(
            *_t(grad, q, k, v, out),
            lse,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
            seed,
            offset,
        )
        dq, dk, dv = _t(*made)
        return dq, dk, dv


class Efficient:
    """The memory-efficient kernel: all types, any bias."""

    name = "torch's memory-efficient attention"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """See `Core`."""
        out, *kept = _aten._scaled_dot_product_efficient_attention.default(
            *_t(q, k, v), _expanded(bias, q, k), True, 0.0, causal
        )
        return out.transpose(1, 2), tuple(kept)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        """See `Core`."""
        # In half precision the kernel reads rows of `out` as if heads lay side by side and rows
        # one after the other, whatever the strides say: with [L, B, E] it would read others' rows.
        out = out.contiguous()
        wanted = [True, True, True, False]
        made = _aten._scaled_dot_product_efficient_attention_backward.default(
            *_t(grad, q, k, v), _expanded(bias, q, k), *_t(out), *kept, 0.0, wanted, causal
        )
        dq, dk, dv = _t(*made[:3])
        return dq, dk, dv


class Cudnn:
    """cuDNN's attention: half precision on Hopper and later."""

    name = "cuDNN's attention"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """See `Core`."""
        made = _aten._scaled_dot_product_cudnn_attention.default(
            *_t(q, k, v), bias, True, 0.0, causal, False
        )
        return made[0].transpose(1, 2), (made[1], made[6], made[7])

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        """See `Core`."""
        made = _aten._scaled_dot_product_cudnn_attention_backward.default(
            *_t(grad, q, k, v, out),
            *kept,
            bias,
            None,
            None,
            q.shape[1],
            k.shape[1],
            0.0,
            causal,
        )
        dq, dk, dv = _t(*made)
        return dq, dk, dv


class OnCpu:
    """torch's fused kernel for the CPU, so that the way of a call can be tested without a GPU."""

    name = "torch's attention for the CPU"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """See `Core`."""
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu.default(
            *_t(q, k, v), 0.0, causal, attn_mask=_expanded(bias, q, k)
        )
        return out.transpose(1, 2), (lse,)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        """See `Core`."""
        made = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *_t(grad, q, k, v, out), *kept, 0.0, causal, attn_mask=_expanded(bias, q, k)
        )
        dq, dk, dv = _t(*made)
        return dq, dk, dv


class ThenOurs:
    """One of torch's operators forward, our kernel of short sequences backward; without a bias.

    cuDNN's forward is the faster from about 100 rows on, our backward up to 256: it reads the row
    sums that any forward leaves, and writes into the products' gradients.
    """

    def __init__(self, torchs: Core) -> None:
        self.torchs = torchs
        self.name = f"{torchs.name}, our kernel backward"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """See `Core`; the bias is None."""
        out, kept = self.torchs.forward(q, k, v, bias, causal)
        return out, (row_sums(kept, q),)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
        targets: Gradients | None = None,
    ) -> Gradients:
        """See `Core`; the gradients are written into `targets`, where those are given."""
        return attention_backward(grad, q, k, v, out, kept[0], Masking(causal), targets)


def row_sums(kept: Kept, q: Tensor) -> Tensor:
    """Return the logarithms of the row sums as our kernels take them, [B, H, L], contiguous.

    cuDNN has one dimension more, the memory-efficient kernel rows beyond the last.
    """
    batch, rows, heads, _ = q.shape
    return kept[0].reshape(batch, heads, -1)[:, :, :rows].contiguous()


class Unfused:
    """torch's plain operators, for heads that no fused kernel takes and where all are off."""

    name = "torch's unfused attention"

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool
    ) -> tuple[Tensor, Kept]:
        """See `Core`."""
        q, k, v = _t(q, k, v)
        made = F.scaled_dot_product_attention(q, k, v, bias, 0.0, causal)
        return made.transpose(1, 2), (q.new_empty(0),)

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        """See `Core`; the forward is computed anew."""
        with torch.enable_grad():
            heads = tuple(tensor.detach().requires_grad_() for tensor in (q, k, v))
            q, k, v = _t(*heads)
            made = F.scaled_dot_product_attention(q, k, v, bias, 0.0, causal)
            dq, dk, dv = torch.autograd.grad(made, heads, grad.transpose(1, 2))
        return dq, dk, dv


def _t(*tensors: Tensor) -> list[Tensor]:
    """Return the views [B, H, length, D] that torch's operators take, or undo that."""
    return [tensor.transpose(1, 2) for tensor in tensors]


def _expanded(bias: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    if bias is None:
        return None
    return bias.expand(q.shape[0], q.shape[2], q.shape[1], k.shape[1])
