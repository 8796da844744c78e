"""Transformer layers whose attention and norms are hfai's, in training and in evaluation.

torch's encoder layer reads its attention's and norms' weights in evaluation and never calls those
modules. Under torch.compile ours calls them; in eager mode torch's one operator for the whole layer
is left alone, since no size has been measured at which the parts win. The decoder layer always
calls its parts: its class is here so that a layer built from it has ours inside.
`nn.TransformerDecoder` and `nn.Transformer` only call their layers and need no class of their own.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.mha import call, dispatch
from hfai.nn import packed, sublayers
from hfai.nn.attention import MultiheadAttention
from hfai.nn.layer_norm import LayerNorm
from hfai.nn.path import Path
from hfai.nn.stand_in import as_leaf, as_method, proxy_among

_PARTS: dict[type[nn.Module], type[nn.Module]] = {
    nn.MultiheadAttention: MultiheadAttention,
    nn.LayerNorm: LayerNorm,
}

# Multiply-adds of a product of E by E from which the parts are called in evaluation, in half
# precision and with sequences as short as our own attention takes: 5000 of 64 rows of 512, where
# they took 0.90 of torch's time. With 32 of 512 rows of 1024 it was 0.98, and small layers lose,
# since the host takes longer over the parts (benchmarks/layers.py).
LEAST_WORK_IN_EVALUATION = 5000 * 64 * 512**2


class TransformerEncoderLayer(nn.TransformerEncoderLayer):
    """`torch.nn.TransformerEncoderLayer` around hfai's attention and norms."""

    @functools.wraps(nn.TransformerEncoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _swap_parts(self)

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Tensor:
        """Run the layer over `src`; see torch's class for shapes and options."""
        if is_scripting():
            return self._scripted(src, src_mask, src_key_padding_mask, is_causal)
        else:  # noqa: RET505 (TorchScript compiles what follows a return, but not this branch)
            return _encode_layer(self, src, src_mask, src_key_padding_mask, is_causal)

    _scripted = as_method(nn.TransformerEncoderLayer.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(
            self.linear1,
            "its attention and norms are called, in evaluation unless torch's one operator runs",
        )


class TransformerDecoderLayer(nn.TransformerDecoderLayer):
    """`torch.nn.TransformerDecoderLayer` around hfai's attention and norms."""

    @functools.wraps(nn.TransformerDecoderLayer.__init__)  # type: ignore[misc]
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        _swap_parts(self)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Tensor | None = None,
        memory_mask: Tensor | None = None,
        tgt_key_padding_mask: Tensor | None = None,
        memory_key_padding_mask: Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Run the layer over `tgt`; see torch's class for shapes and options."""
        if is_scripting():
            return self._scripted(
                tgt,
                memory,
                tgt_mask,
                memory_mask,
                tgt_key_padding_mask,
                memory_key_padding_mask,
                tgt_is_causal,
                memory_is_causal,
            )
        else:  # noqa: RET505 (as above)
            options = {
                "tgt_mask": tgt_mask,
                "memory_mask": memory_mask,
                "tgt_key_padding_mask": tgt_key_padding_mask,
                "memory_key_padding_mask": memory_key_padding_mask,
                "tgt_is_causal": tgt_is_causal,
                "memory_is_causal": memory_is_causal,
            }
            return _decode_layer(self, tgt, memory, options)

    _scripted = as_method(nn.TransformerDecoderLayer.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self.linear1, "its attention and norms are called")


class TransformerEncoder(nn.TransformerEncoder):
    """`torch.nn.TransformerEncoder`, which can leave padded rows out.

    Attributes:
        packed: set it to True on an encoder, and calls with a bool `src_key_padding_mask` compute
            the rows that are not padding alone. Those come out the same; padded rows come out as
            zeros. Finding them makes the host wait for the device once a call.
    """

    packed: bool = False

    def forward(
        self,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Tensor:
        """Run all layers over `src`; see torch's class for shapes and options."""
        if is_scripting():
            return self._scripted(src, mask, src_key_padding_mask, is_causal)
        else:  # noqa: RET505 (as above)
            return _encode(self, src, mask, src_key_padding_mask, is_causal)

    _scripted = as_method(nn.TransformerEncoder.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        reason = "its layers are called"
        if self.packed:
            reason += "; with a key padding mask on the rows that are not padding"
        return _explain(next(iter(self.parameters()), None), reason)


def _encode_layer(
    layer: TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    y: Tensor
    if proxy_among(src, src_mask, src_key_padding_mask) is not None:
        options = {
            "src_mask": src_mask,
            "src_key_padding_mask": src_key_padding_mask,
            "is_causal": is_causal,
        }
        y = as_leaf(layer, src, **options)
    elif not _calls_parts(layer, src, src_mask, src_key_padding_mask):
        y = nn.TransformerEncoderLayer.forward(
            layer, src, src_mask, src_key_padding_mask, is_causal
        )
    elif not sublayers.has_torchs_blocks(layer, nn.TransformerEncoderLayer):
        y = _encode_by_blocks(layer, src, src_mask, src_key_padding_mask, is_causal)
    else:
        x = layer.norm1(src) if layer.norm_first else src
        branch = layer.self_attn(
            x,
            x,
            x,
            attn_mask=src_mask,
            key_padding_mask=src_key_padding_mask,
            need_weights=False,
            is_causal=is_causal,
        )[0]
        y = sublayers.finish_encoder_layer(layer, src, branch)
    return y


def _decode_layer(
    layer: TransformerDecoderLayer, tgt: Tensor, memory: Tensor, options: dict[str, Any]
) -> Tensor:
    y: Tensor
    if proxy_among(tgt, memory, *options.values()) is not None:
        y = as_leaf(layer, tgt, memory, **options)
    elif sublayers.has_torchs_blocks(layer, nn.TransformerDecoderLayer):
        of_tgt, of_memory = (
            {
                "attn_mask": options[f"{name}_mask"],
                "key_padding_mask": options[f"{name}_key_padding_mask"],
                "is_causal": options[f"{name}_is_causal"],
            }
            for name in ("tgt", "memory")
        )
        y = sublayers.decode(layer, tgt, memory, of_tgt, of_memory)
    else:
        y = nn.TransformerDecoderLayer.forward(layer, tgt, memory, **options)
    return y


def _encode(
    encoder: TransformerEncoder,
    src: Tensor,
    mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
    is_causal: bool | None,
) -> Tensor:
    y: Tensor | None
    if proxy_among(src, mask, src_key_padding_mask) is not None:
        options = {
            "mask": mask,
            "src_key_padding_mask": src_key_padding_mask,
            "is_causal": is_causal,
        }
        y = as_leaf(encoder, src, **options)
        return y
    if encoder.packed:
        y = packed.encode(encoder, src, mask, src_key_padding_mask, is_causal)
        if y is not None:
            return y
    y = nn.TransformerEncoder.forward(encoder, src, mask, src_key_padding_mask, is_causal)
    return y


def _encode_by_blocks(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Run torch's forward of the encoder layer without its single operator."""
    if layer.norm_first:
        x = src + layer._sa_block(layer.norm1(src), mask, padding, is_causal)
        y: Tensor = x + layer._ff_block(layer.norm2(x))
    else:
        x = layer.norm1(src + layer._sa_block(src, mask, padding, is_causal))
        y = layer.norm2(x + layer._ff_block(x))
    return y


def _swap_parts(layer: nn.Module) -> None:
    """Make the parts that torch's constructor built hfai's."""
    for module in layer.children():
        ours = _PARTS.get(type(module))
        if ours is not None:
            module.__class__ = ours


def _calls_parts(
    layer: nn.TransformerEncoderLayer,
    src: Tensor,
    src_mask: Tensor | None,
    src_key_padding_mask: Tensor | None,
) -> bool:
    """Return whether a call goes over the layer's parts rather than through torch's forward."""
    if not (src.is_cuda or call.also_on_cpu):
        return False
    if src_mask is not None or src_key_padding_mask is not None:
        dtypes = {m.dtype for m in (src_mask, src_key_padding_mask) if m is not None}
        if len(dtypes) > 1 or not all(d is torch.bool or d.is_floating_point for d in dtypes):
            return False  # torch makes masks of one type, and warns or refuses
    if torch.compiler.is_compiling():
        return True
    if type(src) not in PLAIN_TYPES or src.is_nested or why_watched() is not None:
        return False
    # In training torch's forward calls the parts as well.
    if layer.training or not LEAST_WORK_IN_EVALUATION:
        return True
    rows = src.shape[1 if layer.self_attn.batch_first else 0]
    return (
        src.dim() == 3
        and rows <= dispatch.MOST_ROWS_FORWARD
        and call.product_type(src) is not torch.float32
        and src.numel() * src.shape[-1] >= LEAST_WORK_IN_EVALUATION
    )


def _explain(part: nn.Module | Tensor | None, reason: str) -> Path:
    if not torch.cuda.is_available():
        return Path("torch", "no CUDA device: what is faster in it is for CUDA")
    weight = next(part.parameters(), None) if isinstance(part, nn.Module) else part
    if weight is None:
        return Path("torch", "it has no parameters of its own to go by (quantized, or replaced)")
    if not weight.is_cuda:
        return Path("torch", f"the parameters are on {weight.device.type}, not on CUDA")
    if weight.dtype not in call.DTYPES:
        return Path("torch", f"{weight.dtype} is not among fp32, fp16 and bf16")
    return Path("hfai", reason)
