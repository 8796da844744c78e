"""Which core a call runs on.

Up to 256 queries and keys our kernel is asked first (`kernels.attention.supports`). What it leaves,
and everything longer, goes to the operator that torch itself would choose, by torch's own switches
(`torch.nn.attention.sdpa_kernel`), with known faults routed around.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels.mha.cores import Core, Cudnn, Efficient, Flash, OnCpu, Unfused

FLASH, EFFICIENT, CUDNN, ON_CPU, UNFUSED = Flash(), Efficient(), Cudnn(), OnCpu(), Unfused()
# By the numbers of torch's own enumeration, torch.nn.attention.SDPBackend.
_BACKENDS: dict[int, Core] = {1: FLASH, 2: EFFICIENT, 3: CUDNN}
MOST_HEAD_DIM = 256
# Multiply-adds of a product of E by E below which torch's own inference path, one operator for the
# whole module, is left alone: the host takes longer over a call than the GPU over its work.
LEAST_WORK_IN_INFERENCE = 1 << 29


def why_not_head(head: int, dtype: torch.dtype) -> str | None:
    """Say why torch's fused operators do not take heads of this size as they lie, or None."""
    unit = 4 if dtype is torch.float32 else 8
    if head % unit or head > MOST_HEAD_DIM:
        return f"a head dimension of {head} is no multiple of {unit} up to {MOST_HEAD_DIM}"
    return None


def core_for(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float
) -> Core:
    """Return the core for these heads, [B, length, H, D]."""
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    # 0 where the user has switched all fused ones off, or for heads that none takes.
    backend = _BACKENDS.get(torch._fused_sdp_choice(*heads, bias, dropout, causal), UNFUSED)
    if backend is not UNFUSED and not q.is_cuda:
        return ON_CPU
    if backend is CUDNN and bias is not None and q.shape[1] % 128 == 64:
        # Gradients of q may be NaN there: https://github.com/pytorch/pytorch/issues/196678
        return EFFICIENT
    return backend


def by_torchs_node(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attend without a node of ours: where no gradient is wanted, or weights are dropped.

    Returns:
        The output, [B, L, H, D], differentiable once.
    """
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    keeps = torch.is_grad_enabled() and q.requires_grad
    if keeps and bias is not None and core_for(q, k, v, bias, causal, dropout) is EFFICIENT:
        bias = bias.expand(*heads[0].shape[:3], k.shape[1])
        out = torch.ops.aten._scaled_dot_product_efficient_attention(
            *heads, bias, True, dropout, causal
        )[0]
    else:
        q, k, v = heads
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal)
    result: Tensor = out.transpose(1, 2)
    return result
