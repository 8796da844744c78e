"""Attention weights averaged over heads, beside a core that does not write them.

Our kernel writes them from the row sums that a core left. Where it does not cover the call (fp32
without TF32, odd head dimensions) they are a second product q kᵀ, softmax and mean by torch's
operators, for a few sequences at a time: what lies between the three stays in the L2 cache, and no
[B, H, L, S] is ever held.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.attention import Masking, attention_weights, plan
from hfai.kernels.attention.call import DTYPES, allows_tf32
from hfai.kernels.attention.launch import why_not_rows
from hfai.kernels.mha.cores import Kept, row_sums

CHUNK_BYTES = 1 << 25  # half of an H200's L2 cache


def averaged(q: Tensor, k: Tensor, kept: Kept, bias: Tensor | None, causal: bool) -> Tensor:
    """Return the mean over heads of softmax(q kᵀ / √D + bias), [B, L, S] of q's dtype.

    Args:
        q: [B, L, H, D].
        k: [B, S, H, D].
        kept: what a core left for its backward.
        bias: broadcast to [B, H, L, S], or None; its rows without any key hold NaN.
        causal: query i sees keys 0..i only.
    """
    # torch's unfused attention leaves no row sums.
    if _kernel_covers(q, k) and kept[0].numel():
        mask = bias if bias is None else bias.expand(-1, -1, q.shape[1], -1)
        masking = Masking(causal=causal, attn_mask=mask)
        return attention_weights(q, k, row_sums(kept, q), masking, True)
    return _by_torch(q, k, bias, causal)


def _kernel_covers(q: Tensor, k: Tensor) -> bool:
    """Return whether our kernel of the weights takes such heads; it knows no limit of lengths."""
    head = q.shape[3]
    if not q.is_cuda or head % 8 or head > plan.MOST_HEAD_DIM or q.dtype not in DTYPES:
        return False
    if q.dtype is torch.float32 and not allows_tf32():
        return False
    device = q.get_device()
    if jit.why_unavailable(device) is not None or why_not_rows(q) or why_not_rows(k):
        return False
    limits = jit.device_limits(device)
    return plan.choose_weights(head, q.dtype, q.shape[1], k.shape[1], limits) is not None


def _by_torch(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool) -> Tensor:
    batch, queries, heads, head = q.shape
    keys = k.shape[1]
    q, k = q.transpose(1, 2), k.permute(0, 2, 3, 1)
    later = None
    if causal:
        later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu(1)
    result = q.new_empty((batch, queries, keys))
    step = max(1, CHUNK_BYTES // (heads * queries * keys * q.element_size()))
    for start in range(0, batch, step):
        part = slice(start, start + step)
        scores = torch.matmul(q[part] * head**-0.5, k[part])
        if bias is not None:
            scores += bias if bias.shape[0] == 1 else bias[part]
        if later is not None:
            scores.masked_fill_(later, -math.inf)
        # With its type, or autocast makes it fp32.
        torch.mean(torch.softmax(scores, -1, dtype=q.dtype), 1, out=result[part])
    return result
