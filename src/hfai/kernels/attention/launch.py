"""Launch the attention kernels on CUDA tensors of the current device.

All tensors of heads are [batch, rows or keys, heads, head_dim] by any strides whose rows start on
16 bytes and lie densely in themselves: views of packed or separate, batch-first or sequence-first
memory alike. Nothing is copied.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hfai.kernels.attention import programs
from hfai.kernels.attention.masking import Masking

_LOG2_E = math.log2(math.e)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, masking: Masking, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute softmax(scale * q k^T + masks) v.

    Args:
        q: [batch, rows, heads, head_dim].
        k: [batch, keys, heads, head_dim].
        v: as k.
        masking: masks and scale.
        out: where to write, as q; by default new memory in q's order of batch and rows.

    Returns:
        out, so that `out.flatten(2)` is the [batch, rows, heads * head_dim] that an output
        projection takes, without a copy where `out` was not given; and the natural logarithm of
        each row's sum of exponentials [batch, heads, rows] in fp32, for `attention_backward` and
        `attention_weights`; [2, batch, heads, rows] where masks add numbers (scores.cuh).

    Raises:
        ValueError: no kernel fits (`supports` says so beforehand).
    """
    program = programs.forward(q, k, masking)
    batch, rows, heads, head_dim = q.shape
    if out is None:
        out = like_rows(q)
    sums = (2,) if masking.adds_numbers else ()
    lse = q.new_empty((*sums, batch, heads, rows), dtype=torch.float32)
    masks, mask_strides, _kept = _masks(masking, batch, heads)
    parts = program.plan.parts
    program.kernel.launch(
        batch * heads * parts,
        _stream(q),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        lse.data_ptr(),
        *masks,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *mask_strides,
        heads,
        rows,
        k.shape[1],
        parts,
        masking.scale_for(head_dim) * _LOG2_E,
        math.nan if masking.nan_rows else 0.0,
    )
    return out, lse


def attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor | None,
    lse: Tensor,
    masking: Masking,
    gradients: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq, dk and dv.

    Args:
        dout: the gradient of `attention_forward`'s out, as q; copied if its rows don't lie so.
        q: as given to `attention_forward`.
        k: likewise.
        v: likewise.
        out: as `attention_forward` returned it; may be None where `needs_out` says so.
        lse: as `attention_forward` returned it; one logarithm a row, which any forward leaves, will
            do where masks add no numbers.
        masking: as given to `attention_forward`.
        gradients: where to write dq, dk and dv (three views of one packed gradient, say); by
            default new memory in the order of q, k and v.

    Raises:
        ValueError: no kernel fits, or masks add numbers and lse is one number a row.
    """
    if masking.adds_numbers and lse.dim() != 4:
        raise ValueError(
            f"lse of shape {tuple(lse.shape)} does not come from an attention_forward with masks "
            f"that add numbers: [2, batch, heads, rows]"
        )
    program = programs.backward(q, k, masking)
    batch, rows, heads, head_dim = q.shape
    if why_not_rows(dout):
        dout = dout.clone(memory_format=torch.contiguous_format)  # may be dense, yet off by a few
    if out is None:
        out = q  # not read
    dq, dk, dv = gradients or (like_rows(q), like_rows(k), like_rows(v))
    masks, mask_strides, _kept = _masks(masking, batch, heads)
    scale = masking.scale_for(head_dim)
    program.kernel.launch(
        batch * heads,
        _stream(q),
        q.data_ptr(),
        k.data_ptr(),
        v.data_ptr(),
        out.data_ptr(),
        dout.data_ptr(),
        lse.data_ptr(),
        *masks,
        dq.data_ptr(),
        dk.data_ptr(),
        dv.data_ptr(),
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *out.stride()[:3],
        *dout.stride()[:3],
        *dq.stride()[:3],
        *dk.stride()[:3],
        *dv.stride()[:3],
        *mask_strides,
        heads,
        rows,
        k.shape[1],
        scale * _LOG2_E,
        scale,
    )
    return dq, dk, dv


def attention_weights(
    q: Tensor, k: Tensor, lse: Tensor, masking: Masking, averaged: bool
) -> Tensor:
    """Return the softmax itself, in q's dtype.

    Args:
        q: as given to `attention_forward`.
        k: likewise.
        lse: as `attention_forward` returned it; or one logarithm a row, which any forward leaves,
            and too little for rows in which all keys have large numbers added (-1e6, say).
        masking: as given to `attention_forward`.
        averaged: the mean over the heads [batch, rows, keys], summed in fp32 in the heads' order;
            else of each head [batch, heads, rows, keys].
    """
    program = programs.weights(q, k, masking, averaged, lse.dim() == 4)
    batch, rows, heads, head_dim = q.shape
    keys = k.shape[1]
    made = q.new_empty((batch, rows, keys) if averaged else (batch, heads, rows, keys))
    masks, mask_strides, _kept = _masks(masking, batch, heads)
    row_parts, key_parts = -(-rows // program.plan.rows), -(-keys // program.plan.chunk)
    program.kernel.launch(
        batch * row_parts * key_parts,
        _stream(q),
        q.data_ptr(),
        k.data_ptr(),
        lse.data_ptr(),
        made.data_ptr(),
        *masks,
        *q.stride()[:3],
        *k.stride()[:3],
        *mask_strides,
        heads,
        rows,
        keys,
        row_parts,
        key_parts,
        masking.scale_for(head_dim) * _LOG2_E,
    )
    return made


def needs_out(q: Tensor, k: Tensor, masking: Masking) -> bool:
    """Return whether `attention_backward` will read forward's output."""
    return programs.backward(q, k, masking).plan.needs_out


def like_rows(tensor: Tensor) -> Tensor:
    """Return uninitialised memory of a tensor's shape, dense, in its order of batch and rows."""
    batch, rows, heads, head_dim = tensor.shape
    if tensor.stride(0) < tensor.stride(1):
        return tensor.new_empty((rows, batch, heads, head_dim)).transpose(0, 1)
    return tensor.new_empty((batch, rows, heads, head_dim))


def why_not_rows(tensor: Tensor) -> str | None:
    """Say why a [batch, rows, heads, head_dim] tensor does not lie as kernels read it, or None."""
    if tensor.stride(3) != 1 and tensor.shape[3] != 1:
        return "a head's elements do not lie side by side"
    vector = 16 // tensor.element_size()
    strides = tensor.stride()
    if tensor.data_ptr() % 16 or any(strides[d] % vector and tensor.shape[d] > 1 for d in range(3)):
        return "a head's rows do not start on multiples of 16 bytes"
    return "the values' signs are kept aside as a bit" if tensor.is_neg() else None


def _stream(tensor: Tensor) -> int:
    return torch._C._cuda_getCurrentRawStream(tensor.get_device())


def _masks(
    masking: Masking, batch: int, heads: int
) -> tuple[tuple[int, int], tuple[int, int, int, int, int], tuple[Tensor | None, Tensor | None]]:
    """Return both masks' addresses, their strides as the kernels take them, and what holds them."""
    mask, key_mask = masking.attn_mask, masking.key_padding_mask
    of_mask, of_key_mask = (0, 0, 0), (0, 0)
    if mask is not None:
        if mask.stride(-1) != 1:
            mask = mask.contiguous()
        if mask.dim() == 2:
            of_mask = (0, 0, mask.stride(0))
        elif mask.dim() == 3:
            of_mask = (mask.stride(0) * heads, mask.stride(0), mask.stride(1))
        else:
            wide = mask.expand(batch, heads, -1, -1)
            of_mask = wide.stride()[:3]  # type: ignore[assignment]
    if key_mask is not None:
        of_key_mask = (key_mask.stride(0), key_mask.stride(1))
    addresses = (
        0 if mask is None else mask.data_ptr(),
        0 if key_mask is None else key_mask.data_ptr(),
    )
    return addresses, (*of_mask, *of_key_mask), (mask, key_mask)
