"""A call of MultiheadAttention under torch.compile: the same shape of work in torch's operators.

torch's own forward copies q, k and v apart, and with `need_weights=True` computes the output from
weights that it wrote to memory. Here the output comes from fused attention on views of the input
product, and the weights from a product of their own, which the compiler drops where the caller
drops them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfai.kernels.mha import call
from hfai.kernels.mha.call import Options, why_not_covered
from hfai.kernels.mha.projections import Layout, project


def attend(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None] | None:
    """Trace a call without masks, batched, or return None: torch's turn."""
    if not (query.is_cuda or call.also_on_cpu) or why_not_covered(module) is not None:
        return None
    if query.dim() != 3 or key.dim() != 3 or value.dim() != 3:
        return None
    if options.key_padding_mask is not None or not _is_plain_causal(options):
        return None
    dropout = module.dropout if module.training else 0.0
    if options.need_weights and (dropout or not options.average_attn_weights):
        return None
    if query.shape[-1] != module.embed_dim or key.shape[:2] != value.shape[:2]:
        return None  # which torch refuses
    if query.shape[not module.batch_first] != key.shape[not module.batch_first]:
        return None  # likewise
    layout = Layout(module.num_heads, module.batch_first)
    q, k, v = (part.transpose(1, 2) for part in layout.split(project(module, query, key, value)))
    out = F.scaled_dot_product_attention(q, k, v, None, dropout, options.is_causal)
    rows = layout.join(out.transpose(1, 2))
    y = F.linear(rows, module.out_proj.weight, module.out_proj.bias)
    if not options.need_weights:
        return y, None
    scores = torch.matmul(q * module.head_dim**-0.5, k.transpose(-2, -1))
    return y, torch.softmax(scores, -1).mean(1)


def _is_plain_causal(options: Options) -> bool:
    """Return whether there is no attention mask, or the hint stands for it as torch reads it."""
    if options.attn_mask is None:
        return not options.is_causal  # which torch refuses
    return options.is_causal and not options.need_weights
