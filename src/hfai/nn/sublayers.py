"""The end of a transformer layer's sublayers in one kernel: dropout, residual sum and LayerNorm.

torch's layers write `norm(x + dropout(sublayer(x)))`, or, with `norm_first`, take the norm of the
sum at the start of the next sublayer. Where the modules that do so are torch's own (or ours) and
nobody listens to them, `kernels.residual_norm` does it at once, the bias of the linear map before
it included. Under autocast the norm is written twice, in fp32 for the next residual sum and in half
precision for the next product, which spares a cast and its gradient's sum.

Parameters are read by attribute on every call. Where anything differs the modules are called.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from hfai.kernels import products, residual_norm
from hfai.kernels.coverage import PLAIN_TYPES
from hfai.kernels.residual_norm import Outputs
from hfai.nn.layer_norm import LayerNorm


def has_listeners(*modules: nn.Module) -> bool:
    """Return whether calling these modules does more than their forward says: hooks, patches."""
    return bool(_has_any_global_hook()) or any(  # type: ignore[no-untyped-call]
        m._forward_hooks
        or m._forward_pre_hooks
        or m._backward_hooks
        or m._backward_pre_hooks
        or "forward" in m.__dict__
        for m in modules
    )


def has_torchs_blocks(layer: nn.Module, torch_class: type[nn.Module]) -> bool:
    """Return whether the layer's sublayers are torch's methods, and not a subclass's or patched."""
    names = ("_sa_block", "_mha_block", "_ff_block")
    return all(
        getattr(type(layer), name, None) is getattr(torch_class, name, None)
        and name not in layer.__dict__
        for name in names
    )


def add_and_normalise(
    branch: Tensor,
    residual: Tensor,
    dropout: nn.Dropout,
    norm: nn.LayerNorm,
    reader: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Return norm(residual + dropout(branch)) twice: for the next sum, and as `reader` takes it.

    Args:
        branch: what a sublayer computed, [..., N].
        residual: of the same shape.
        dropout: the module in between.
        norm: the norm over N.
        reader: the linear map that reads the result next to the residual sum, if one does.
    """
    made = _fused(branch, None, residual, dropout, norm, half=_is_plain_linear(reader))
    if made is None or made.y is None:
        y: Tensor = norm(residual + dropout(branch))
        return y, y
    return made.y, made.y if made.half is None else made.half


def add_then_normalise(
    branch: Tensor,
    residual: Tensor,
    dropout: nn.Dropout,
    norm: nn.LayerNorm,
    reader: nn.Module | None = None,
) -> tuple[Tensor, Tensor]:
    """Return z = residual + dropout(branch), and norm(z) as `reader` alone takes it."""
    half = _is_plain_linear(reader)
    made = _fused(branch, None, residual, dropout, norm, z=True, y=False, half=half)
    if made is None or made.z is None:
        z = residual + dropout(branch)
        return z, norm(z)
    read = made.y if made.half is None else made.half
    assert read is not None
    return made.z, read


def contract_and_normalise(
    inner: Tensor, linear: nn.Linear, residual: Tensor, dropout: nn.Dropout, norm: nn.LayerNorm
) -> Tensor:
    """Return norm(residual + dropout(linear(inner))), the linear map's bias left to the kernel."""
    bias = None
    if _may_be_fused(dropout, norm) and residual_norm.is_large(residual):
        branch, bias = _without_bias(linear, inner)
        made = _fused(branch, bias, residual, dropout, norm)
        if made is not None and made.y is not None:
            return made.y
        branch = branch if bias is None else branch + bias.to(branch.dtype)
    else:
        branch = _call(linear, inner)
    y: Tensor = norm(residual + dropout(branch))
    return y


def finish_encoder_layer(layer: nn.TransformerEncoderLayer, src: Tensor, branch: Tensor) -> Tensor:
    """Return what the layer makes of its input and of what its attention returned."""
    if layer.norm_first:
        x, read = add_then_normalise(branch, src, layer.dropout1, layer.norm2, layer.linear1)
        inner = layer.dropout(layer.activation(_call(layer.linear1, read)))
        y: Tensor = x + layer.dropout2(_call(layer.linear2, inner))
        return y
    x, read = add_and_normalise(branch, src, layer.dropout1, layer.norm1, layer.linear1)
    inner = layer.dropout(layer.activation(_call(layer.linear1, read)))
    return contract_and_normalise(inner, layer.linear2, x, layer.dropout2, layer.norm2)


def decode(
    layer: nn.TransformerDecoderLayer,
    tgt: Tensor,
    memory: Tensor,
    of_tgt: dict[str, Any],
    of_memory: dict[str, Any],
) -> Tensor:
    """Return what torch's forward of the decoder layer returns.

    Args:
        layer: with torch's sublayers (`has_torchs_blocks`).
        tgt: its input.
        memory: what its second attention reads.
        of_tgt: masks of the first attention, by the names of its forward.
        of_memory: masks of the second.
    """
    x = layer.norm1(tgt) if layer.norm_first else tgt
    branch = layer.self_attn(x, x, x, need_weights=False, **of_tgt)[0]
    if layer.norm_first:
        x, read = add_then_normalise(branch, tgt, layer.dropout1, layer.norm2)
        branch = layer.multihead_attn(read, memory, memory, need_weights=False, **of_memory)[0]
        x, read = add_then_normalise(branch, x, layer.dropout2, layer.norm3, layer.linear1)
        inner = layer.dropout(layer.activation(_call(layer.linear1, read)))
        y: Tensor = x + layer.dropout3(_call(layer.linear2, inner))
        return y
    x, read = add_and_normalise(branch, tgt, layer.dropout1, layer.norm1)
    branch = layer.multihead_attn(read, memory, memory, need_weights=False, **of_memory)[0]
    x, read = add_and_normalise(branch, x, layer.dropout2, layer.norm2, layer.linear1)
    inner = layer.dropout(layer.activation(_call(layer.linear1, read)))
    return contract_and_normalise(inner, layer.linear2, x, layer.dropout3, layer.norm3)


def _fused(
    branch: Tensor,
    branch_bias: Tensor | None,
    residual: Tensor,
    dropout: nn.Dropout,
    norm: nn.LayerNorm,
    *,
    z: bool = False,
    y: bool = True,
    half: bool = False,
) -> Outputs | None:
    """Return the kernel's outputs, or None where it does not cover the call.

    Where autocast is not what makes the branch narrow, `half` is nothing else than `y`.
    """
    if not _may_be_fused(dropout, norm) or not residual_norm.is_large(residual):
        return None
    if norm.normalized_shape[0] != branch.shape[-1]:
        return None  # which torch refuses
    half = half and _is_narrowed(branch)
    parts = (branch, branch_bias, residual, norm.weight, norm.bias)
    p = float(dropout.p) if dropout.training else 0.0
    return residual_norm.normalise_sum(*parts, norm.eps, p, z=z, y=y or not half, half=half)


def _may_be_fused(dropout: nn.Dropout, norm: nn.LayerNorm) -> bool:
    """Return whether the two modules are torch's own or ours, with nothing attached.

    A compiler fuses these itself. Lengths and types are the kernels' to look at.
    """
    return (
        not torch.compiler.is_compiling()
        and type(dropout) is nn.Dropout
        and not dropout.inplace
        and type(norm) in (LayerNorm, nn.LayerNorm)
        and len(norm.normalized_shape) == 1
        and not has_listeners(dropout, norm)
    )


def _is_narrowed(branch: Tensor) -> bool:
    """Return whether autocast is on and has made `branch`: the next product reads its type."""
    device = branch.device.type
    return torch.is_autocast_enabled(device) and branch.dtype is torch.get_autocast_dtype(device)


def _is_plain_linear(module: nn.Module | None) -> bool:
    return type(module) is nn.Linear and not has_listeners(module)


def _without_bias(linear: nn.Linear, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return `linear(x)`, its bias apart where nothing hinders that: (product, bias)."""
    if _is_plain_linear(linear) and linear.bias is not None:
        weight, bias = linear.weight, linear.bias
        if type(weight) in PLAIN_TYPES and type(bias) in PLAIN_TYPES:
            return products.linear(x, weight, None), bias
    return linear(x), None


def _call(linear: nn.Module, x: Tensor) -> Tensor:
    """Return `linear(x)`, in fp32's own accuracy by our kernels where they are faster."""
    if _is_plain_linear(linear) and isinstance(x, Tensor):
        return products.linear(x, linear.weight, linear.bias)  # type: ignore[arg-type]
    y: Tensor = linear(x)
    return y
