"""Masks as torch's module takes them, merged into one bias that is added to the scores.

The bias is as small as the masks allow: [B, 1, 1, S] for a key padding mask, [1, 1, L, S] for a
two-dimensional attention mask, [B, H, L, S] for one of each head. Its rows start on 16-element
boundaries, as torch's memory-efficient kernel asks.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from hfai.kernels.attention import Masking
from hfai.kernels.coverage import PLAIN_TYPES

ALIGNMENT = 16


def why_not_fitting(
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    sizes: tuple[int, int, int, int],
    device: torch.device,
) -> str | None:
    """Say what of the masks is not covered or must be refused by torch, or None.

    Args:
        key_padding_mask: [B, S].
        attn_mask: [L, S] or [B * H, L, S].
        sizes: B, H, L, S.
        device: where the inputs are.
    """
    batch, heads, queries, keys = sizes
    for mask in (key_padding_mask, attn_mask):
        if mask is None:
            continue
        if type(mask) not in PLAIN_TYPES or mask.layout is not torch.strided:
            return "a mask is a tensor subclass, nested or sparse"
        if mask.device != device:
            return f"a mask is on {mask.device} and the inputs on {device}"
        if mask.requires_grad and torch.is_grad_enabled():
            return "a mask is learnable"
        if mask.dtype is not torch.bool and not mask.is_floating_point():
            return f"a mask is {mask.dtype}"
    if key_padding_mask is not None and key_padding_mask.shape != (batch, keys):
        return "the key padding mask has another shape"
    if attn_mask is not None and attn_mask.shape not in (
        (queries, keys),
        (batch * heads, queries, keys),
    ):
        return "the attention mask has another shape"
    if (
        key_padding_mask is not None
        and attn_mask is not None
        and (key_padding_mask.dtype is torch.bool) != (attn_mask.dtype is torch.bool)
    ):
        return "one mask is bool and the other is not"  # torch warns
    return None


def shifts_scores(key_padding_mask: Tensor | None, attn_mask: Tensor | None) -> bool:
    """Return whether a mask adds numbers, and may so lower a whole row."""
    return any(
        mask is not None and mask.dtype is not torch.bool for mask in (key_padding_mask, attn_mask)
    )


def as_bias(masking: Masking, q: Tensor, k: Tensor) -> Tensor | None:
    """Merge the masks into one bias of q's type, or return None where there is none.

    A bias of another type than q's is read wrongly by cuDNN's attention. Rows without any key
    become NaN where `nan_rows` says so, from which come NaNs as from softmax over nothing; else
    they stay -inf, from which fused attention makes zeros.

    Args:
        masking: with masks in which `why_not_fitting` found nothing.
        q: [B, L, H, D].
        k: [B, S, H, D].
    """
    key_padding_mask, attn_mask = masking.key_padding_mask, masking.attn_mask
    batch, queries, heads, _ = q.shape
    keys, dtype = k.shape[1], q.dtype
    masks = []
    if key_padding_mask is not None:
        masks.append(key_padding_mask.view(batch, 1, 1, keys))
    if attn_mask is not None:
        shape = (1, 1) if attn_mask.dim() == 2 else (batch, heads)
        masks.append(attn_mask.reshape(*shape, queries, keys))
    if not masks:
        return None
    mask = masks[0]
    if len(masks) == 2:
        mask = mask | masks[1] if mask.dtype is torch.bool else masks[1] + mask
    if mask.dtype is torch.bool:
        bias = _aligned(mask, dtype).masked_fill_(mask, -math.inf)
    elif mask.dtype is dtype and _is_aligned(mask):
        bias = mask.detach()
    else:
        bias = _aligned(mask, dtype).copy_(mask)
    if masking.nan_rows:
        # Out of place: the bias may be the caller's own mask.
        bias = bias.masked_fill((bias == -math.inf).all(-1, keepdim=True), math.nan)
    return bias


def kept_apart(masking: Masking) -> Masking:
    """Return the masks as backward may keep them: copies, except of a float mask of each head.

    torch makes its own mask out of them, so that the caller may fill a buffer anew, or may have
    made it under `inference_mode`. The exception is torch's too, and as large as the scores.
    """
    attn_mask, padding = masking.attn_mask, masking.key_padding_mask
    if attn_mask is None and padding is None:
        return masking
    if attn_mask is not None and (attn_mask.dim() == 2 or attn_mask.dtype is torch.bool):
        attn_mask = attn_mask.detach().clone()
    if padding is not None:
        padding = padding.detach().clone()
    return dataclasses.replace(masking, attn_mask=attn_mask, key_padding_mask=padding)


def _is_aligned(mask: Tensor) -> bool:
    """Return whether the mask's rows start on aligned boundaries, as it lies in memory."""
    *outer, last = mask.stride()
    rows = [step for step, size in zip(outer, mask.shape[:-1], strict=True) if size > 1]
    return (
        last == 1
        and mask.shape[-1] % ALIGNMENT == 0
        and all(step % ALIGNMENT == 0 for step in rows)
        and mask.data_ptr() % 16 == 0
    )


def _aligned(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return zeros of the mask's shape whose rows start on aligned boundaries."""
    keys = mask.shape[-1]
    padded = -(-keys // ALIGNMENT) * ALIGNMENT
    return mask.new_zeros((*mask.shape[:-1], padded), dtype=dtype)[..., :keys]
