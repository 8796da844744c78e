"""Which keys a row may see, and what is added to its scores."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Masking:
    """The options of one attention call, as torch.nn.MultiheadAttention means them."""

    causal: bool = False
    """Row i sees keys 0 to i only; applies together with the masks."""
    attn_mask: Tensor | None = None
    """[rows, keys], [batch * heads, rows, keys], or four dimensions that broadcast to [batch,
    heads, rows, keys]. Bool (True: may NOT be seen), or added to the scores: of q's dtype, or fp32.
    """
    key_padding_mask: Tensor | None = None
    """[batch, keys]; bool (True: is ignored), or added to the scores: of q's dtype, or fp32."""
    scale: float | None = None
    """What products of q and k are multiplied with, above zero; None for 1 / sqrt(head_dim)."""
    nan_rows: bool = False
    """What a row gets that may see no key: zeros, as from torch's
    scaled_dot_product_attention, or NaN, as from torch.softmax, which MultiheadAttention uses where
    it returns weights."""

    def scale_for(self, head_dim: int) -> float:
        """Return `scale`, or its default."""
        return 1.0 / math.sqrt(head_dim) if self.scale is None else self.scale

    @property
    def adds_numbers(self) -> bool:
        """Whether a mask adds numbers, and doesn't only exclude keys."""
        masks = (self.attn_mask, self.key_padding_mask)
        return any(mask is not None and mask.dtype is not torch.bool for mask in masks)
