"""The input products, and q, k and v as views of what they wrote.

With q = k = v there is one product of [.., 3E]; with k = v there is one for q and one of [.., 2E];
otherwise there are three. Nothing is copied or transposed afterwards: cores take strides.

Shapes: B sequences, L queries and S keys each, E features, H heads of D. Rows are [B, L, E], or
[L, B, E] where `batch_first` is False. Heads are [B, L, H, D] either way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor, nn

from hfai.kernels.products import linear


class Layout(NamedTuple):
    """How rows lie: over how many heads E is split, and `batch_first` as in torch's module."""

    heads: int
    batch_first: bool

    def split(self, projections: Sequence[Tensor]) -> list[Tensor]:
        """Return q, k and v as views [B, length, H, D] of one, two or three projections."""
        parts: list[Tensor] = []
        for i, projection in enumerate(projections):
            # The last holds what is left of the three; those before it hold one each.
            held = 3 - i if i == len(projections) - 1 else 1
            first, second, width = projection.shape
            shape = (first, second, held, self.heads, width // (held * self.heads))
            parts += projection.view(shape).unbind(2)
        return parts if self.batch_first else [part.transpose(0, 1) for part in parts]

    def join(self, heads: Tensor) -> Tensor:
        """Return rows from [B, L, H, D], dense: a view where that lies as rows do, else a copy."""
        return (heads if self.batch_first else heads.transpose(0, 1)).flatten(2).contiguous()

    def apart(self, rows: Tensor) -> Tensor:
        """Return the view [B, L, H, D] of rows."""
        first, second, width = rows.shape
        heads = rows.view(first, second, self.heads, width // self.heads)
        return heads if self.batch_first else heads.transpose(0, 1)


def project(module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Multiply by the input weights: one product where q, k and v are one tensor, two where k is v.

    Args:
        module: its parameters are read as they are now.
        q: rows of L.
        k: rows of S.
        v: rows of S.
    """
    bias = module.in_proj_bias
    inputs: tuple[Tensor, ...]
    weights: Sequence[Tensor]
    biases: Sequence[Tensor | None]
    if not module._qkv_same_embed_dim:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        inputs, sizes = (q, k, v), [module.embed_dim] * 3
    else:
        weight = module.in_proj_weight
        if q is k and k is v:
            return [linear(q, weight, bias)]
        width = module.embed_dim
        inputs, sizes = ((q, k), [width, 2 * width]) if k is v else ((q, k, v), [width] * 3)
        weights = weight.split_with_sizes(sizes)
    biases = (None,) * len(sizes) if bias is None else bias.split_with_sizes(sizes)
    return [linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True)]
