"""Attention in torch's operators: for derivatives of derivatives and gradients into the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from hfai.kernels.attention.masking import Masking


def attention(q: Tensor, k: Tensor, v: Tensor, masking: Masking) -> tuple[Tensor, Tensor]:
    """Compute the same as `launch.attention_forward`, differentiably, in fp32 or wider.

    Args:
        q: [batch, rows, heads, head_dim].
        k: [batch, keys, heads, head_dim].
        v: as k.
        masking: masks and scale.

    Returns:
        out [batch, rows, heads, head_dim] and the weights [batch, heads, rows, keys].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    batch, rows, heads, head_dim = q.shape
    keys = k.shape[1]
    scores = torch.einsum("blhd,bshd->bhls", q.to(dtype), k.to(dtype))
    scores = scores * masking.scale_for(head_dim)
    mask = masking.attn_mask
    if mask is not None:
        if mask.dim() == 3:
            mask = mask.reshape(batch, heads, rows, keys)
        scores = scores + _added(mask, dtype)
    if masking.key_padding_mask is not None:
        scores = scores + _added(masking.key_padding_mask, dtype)[:, None, None, :]
    if masking.causal:
        later = torch.ones(rows, keys, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    if masking.nan_rows:
        weights = scores.softmax(-1)
    else:  # no NaN on the way either: in backward it would come back as NaN times zero
        none = (scores == -torch.inf).all(-1, keepdim=True)
        weights = scores.masked_fill(none, 0.0).softmax(-1).masked_fill(none, 0.0)
    out = torch.einsum("bhls,bshd->blhd", weights, v.to(dtype))
    return out.to(q.dtype), weights.to(q.dtype)


def _added(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype is not torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)
