"""Which attention calls the kernels cover.

Answers come from types, shapes, strides and the device alone; nothing here looks at the data.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.attention import plan
from hfai.kernels.attention.launch import why_not_rows
from hfai.kernels.attention.masking import Masking
from hfai.kernels.attention.precision import allows_tf32 as allows_tf32
from hfai.kernels.attention.precision import is_split
from hfai.kernels.coverage import PLAIN_TYPES, why_not_plain, why_watched

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

_NO_MASKING = Masking()


def supports(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    masking: Masking = _NO_MASKING,
    *,
    dropout: float = 0.0,
    differentiable: bool | None = None,
) -> str | None:
    """Say why `attention` does not cover a call, or None where it does.

    Args:
        q: [batch, rows, heads, head_dim].
        k: [batch, keys, heads, head_dim].
        v: as k.
        masking: masks and scale.
        dropout: probability with which weights are dropped in this call.
        differentiable: whether backward will follow; None for: grad mode is on and one of q, k, v
            requires a gradient.
    """
    reason = (
        why_watched()
        or _why_not_tensors(q, k, v)
        or why_not_shapes(q, k, v)
        or why_not_masks(q, k, masking)
    )
    if reason is not None:
        return reason
    if dropout > 0.0:
        return f"dropout of attention weights (p={dropout}) is torch's"
    if differentiable is None:
        differentiable = torch.is_grad_enabled() and any(t.requires_grad for t in (q, k, v))
    device = q.get_device()
    reason = jit.why_unavailable(device)
    if reason is not None:
        return reason
    return why_no_plan(
        q.shape[3], q.dtype, q.shape[1], k.shape[1], jit.device_limits(device), differentiable
    )


def supports_packed(
    qkv: Tensor,
    heads: int,
    masking: Masking = _NO_MASKING,
    *,
    batch_first: bool = True,
    dropout: float = 0.0,
    differentiable: bool | None = None,
) -> str | None:
    """Say why `packed_attention` does not cover a call, or None where it does.

    Args:
        qkv: [batch, rows, 3 * heads * head_dim], or [rows, batch, ...] without `batch_first`.
        heads: number of heads.
        masking: masks and scale.
        batch_first: whether the batch is the first dimension.
        dropout: probability with which weights are dropped in this call.
        differentiable: as `supports` takes it.
    """
    reason = why_not_plain(qkv)
    if reason is not None:
        return reason
    if qkv.dim() != 3 or heads < 1 or qkv.shape[2] % (3 * heads):
        return f"a packed projection of shape {tuple(qkv.shape)} is not 3 times {heads} heads wide"
    q, k, v = unpack(qkv, heads, batch_first)
    return supports(q, k, v, masking, dropout=dropout, differentiable=differentiable)


def unpack(qkv: Tensor, heads: int, batch_first: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k, v as views [batch, rows, heads, head_dim] of one product."""
    first, second, width = qkv.shape
    view = qkv.view(first, second, 3, heads, width // (3 * heads))
    if not batch_first:
        view = view.transpose(0, 1)
    q, k, v = view.unbind(2)
    return q, k, v


def why_no_plan(
    head_dim: int,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    limits: jit.DeviceLimits,
    differentiable: bool,
) -> str | None:
    """Say why shapes do not fit a device, or None where they do."""
    sizes = (head_dim, dtype, rows, keys, limits, is_split(dtype))
    if plan.choose_forward(*sizes) is None:
        which = "forward"
    elif differentiable and plan.choose_backward(*sizes) is None:
        which = "backward"
    else:
        return None
    return (
        f"{rows} rows and {keys} keys with a head dimension of {head_dim} in {dtype} do not fit "
        f"the device's shared memory and registers in the {which} kernel"
    )


def _why_not_tensors(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    for tensor in (q, k, v):
        reason = why_not_plain(tensor)
        if reason is not None:
            return reason
        if tensor.dtype is not q.dtype:
            return f"q is {q.dtype} and k or v is {tensor.dtype}"
        if tensor.get_device() != q.get_device():
            return f"q is on {q.device} and k or v on {tensor.device}"
    if q.dtype not in DTYPES:
        return f"{q.dtype} is not among fp32, fp16 and bf16"
    return None


def why_not_shapes(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Say what of sizes and strides is not covered, or None."""
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        return "q, k and v are not [batch, rows, heads, head_dim]"
    batch, rows, heads, head_dim = q.shape
    if k.shape != v.shape or (k.shape[0], *k.shape[2:]) != (batch, heads, head_dim):
        return f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit together"
    if 0 in q.shape or 0 in k.shape:
        return "there is nothing to compute"
    if rows > plan.MOST_ROWS or k.shape[1] > plan.MOST_KEYS:
        return f"{rows} rows and {k.shape[1]} keys: the kernels are for at most {plan.MOST_KEYS}"
    if head_dim % 8 or head_dim > plan.MOST_HEAD_DIM:
        return f"a head dimension of {head_dim} is no multiple of 8 up to {plan.MOST_HEAD_DIM}"
    if batch * heads * rows >= 1 << 31:
        return "there are 2^31 rows or more"
    for tensor in (q, k, v):
        reason = why_not_rows(tensor)
        if reason is not None:
            return reason
    return None


def why_not_masks(q: Tensor, k: Tensor, masking: Masking) -> str | None:
    """Say what of the masks and the scale is not covered, or None."""
    batch, rows, heads, _ = q.shape
    keys = k.shape[1]
    if masking.scale is not None and not masking.scale > 0.0:
        return f"the scale is {masking.scale}, and must be above zero"
    for name, mask in (
        ("attn_mask", masking.attn_mask),
        ("key_padding_mask", masking.key_padding_mask),
    ):
        if mask is None:
            continue
        if type(mask) not in PLAIN_TYPES or mask.is_neg() or mask.layout is not torch.strided:
            return f"{name} is no plain tensor"
        if mask.get_device() != q.get_device():
            return f"{name} is on {mask.device} and q on {q.device}"
        if mask.dtype not in (torch.bool, torch.float32, q.dtype):
            return f"{name} is {mask.dtype}, and neither bool, fp32 nor q's {q.dtype}"
        if mask.requires_grad and torch.is_grad_enabled():
            return f"{name} requires a gradient"
        if mask.is_inference() and torch.is_grad_enabled():
            return f"{name} was made under inference_mode and cannot be kept for backward"
    mask, key_mask = masking.attn_mask, masking.key_padding_mask
    if key_mask is not None and tuple(key_mask.shape) != (batch, keys):
        return f"key_padding_mask has shape {tuple(key_mask.shape)}, not {(batch, keys)}"
    if mask is not None:
        shape = tuple(mask.shape)
        fits = shape in ((rows, keys), (batch * heads, rows, keys)) or (
            len(shape) == 4
            and shape[0] in (1, batch)
            and shape[1] in (1, heads)
            and shape[2:] == (rows, keys)
        )
        if not fits:
            return f"attn_mask of shape {shape} does not fit {(batch, heads, rows, keys)}"
    return None
