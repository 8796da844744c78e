"""An encoder's layers over the rows that are not padding, and those alone.

All products, norms and activations work on [T, E], where T counts the tokens of the batch that are
no padding. Only attention needs sequences: the input product's rows are put back into [B, L, 3E]
for it, where masked keys cost little, and its output is gathered again.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hfai.kernels.attention import Masking
from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.mha import call, dispatch
from hfai.kernels.mha.projections import Layout
from hfai.kernels.products import linear
from hfai.nn import sublayers


def encode(
    encoder: nn.TransformerEncoder,
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool | None,
) -> Tensor | None:
    """Encode without padded rows, or return None where the call is not covered.

    Args:
        encoder: its layers and norm are read as they are now.
        src: [B, L, E] or [L, B, E], as the layers' `batch_first` says.
        mask: must be None.
        padding: bool [B, L], True where a token is padding.
        is_causal: must not be True.

    Returns:
        As src; rows of padding are zeros.
    """
    if padding is None or mask is not None or is_causal or torch.compiler.is_compiling():
        return None
    if type(src) not in PLAIN_TYPES or src.is_nested or src.dim() != 3 or not src.numel():
        return None
    if type(padding) not in PLAIN_TYPES or padding.dtype is not torch.bool:
        return None
    if why_watched() is not None or not all(_is_plain(layer) for layer in encoder.layers):
        return None
    batch_first = encoder.layers[0].self_attn.batch_first
    x = src if batch_first else src.transpose(0, 1)
    if padding.shape != x.shape[:2] or padding.device != x.device:
        return None  # which torch refuses
    dtype, length = call.product_type(x), x.shape[1]
    if dispatch.why_torchs(length, length, dtype, by_torchs_node=False) is not None:
        return None
    if x.is_cuda and dispatch.why_not_precision(
        dtype, x.shape[0] * length, x.shape[2], x.get_device()
    ):
        return None
    head = encoder.layers[0].self_attn.head_dim
    if x.is_cuda and dispatch.why_not_head(head, dtype) is not None:
        return None
    rows = padding.logical_not().flatten().nonzero().squeeze(1)
    masking = Masking(key_padding_mask=padding)
    x = x.flatten(0, 1).index_select(0, rows)
    for layer in encoder.layers:
        x = _run_layer(layer, x, rows, masking)
    if encoder.norm is not None:
        x = encoder.norm(x)
    y = _put_back(x, rows, padding.shape)
    return y if batch_first else y.transpose(0, 1)


def _is_plain(layer: nn.Module) -> bool:
    """Return whether the layer does nothing but what torch's class says, attention included."""
    if not isinstance(layer, nn.TransformerEncoderLayer):
        return False
    attention = layer.self_attn
    plain = type(layer).forward.__module__ in _FORWARDS and "forward" not in layer.__dict__
    return (
        plain
        and type(attention).forward.__module__ in _FORWARDS
        and "forward" not in attention.__dict__
        and sublayers.has_torchs_blocks(layer, nn.TransformerEncoderLayer)
        and attention._qkv_same_embed_dim
        and call.why_not_covered(attention) is None
        and not any(m._forward_hooks or m._forward_pre_hooks for m in (layer, attention))
        and not any(m._backward_hooks or m._backward_pre_hooks for m in (layer, attention))
    )


_FORWARDS = (
    "torch.nn.modules.transformer",
    "torch.nn.modules.activation",
    "hfai.nn.transformer",
    "hfai.nn.attention",
)


def _run_layer(
    layer: nn.TransformerEncoderLayer, x: Tensor, rows: Tensor, masking: Masking
) -> Tensor:
    """Run one layer over [T, E]."""
    attended = _attend(layer, layer.norm1(x) if layer.norm_first else x, rows, masking)
    return sublayers.finish_encoder_layer(layer, x, attended)


def _attend(layer: nn.TransformerEncoderLayer, x: Tensor, rows: Tensor, masking: Masking) -> Tensor:
    module = layer.self_attn
    padding = masking.key_padding_mask
    assert padding is not None
    product = linear(x, module.in_proj_weight, module.in_proj_bias)
    whole = _put_back(product, rows, padding.shape)
    dropout = float(module.dropout) if module.training else 0.0
    made, _ = call.attend_products(
        [whole], Layout(module.num_heads, True), masking, need_weights=False, dropout=dropout
    )
    made = made.flatten(0, 1).index_select(0, rows)
    return linear(made, module.out_proj.weight, module.out_proj.bias)


def _put_back(x: Tensor, rows: Tensor, shape: torch.Size) -> Tensor:
    """Return [B, L, *] with `x` in the given rows, counted over B and L, and zeros elsewhere."""
    whole = x.new_zeros((shape.numel(), x.shape[1]))
    return whole.index_copy(0, rows, x).view(*shape, x.shape[1])
