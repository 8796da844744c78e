"""Which calls of MultiheadAttention run here, and how such a call is made.

A call that is not covered, or that torch must refuse, goes to torch's own forward as it came; what
tells them apart are types, shapes and options, never the data.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.cuda import current_device
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hfai.kernels import attention
from hfai.kernels.attention import Masking
from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.mha import dispatch, masks
from hfai.kernels.mha.autograd import apply_attend
from hfai.kernels.mha.projections import Layout, project
from hfai.kernels.products import linear

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

also_on_cpu = False
"""Tests set this: CPU tensors then go the way of CUDA ones, with torch's CPU operator as core."""


class Options(NamedTuple):
    """What a call of the module was given besides query, key and value."""

    key_padding_mask: Tensor | None
    need_weights: bool
    attn_mask: Tensor | None
    average_attn_weights: bool
    is_causal: bool


def attend(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None] | None:
    """Run a call of the module on fused attention, or return None: torch's turn."""
    if type(query) not in PLAIN_TYPES or not (query.is_cuda or also_on_cpu):
        return None
    if type(key) not in PLAIN_TYPES or type(value) not in PLAIN_TYPES:
        return None
    if query.is_nested or key.is_nested or value.is_nested:  # they have no shape to ask for
        return None
    if is_small_inference(module, query, key, value, options.need_weights):
        return None
    if query.is_cuda and query.get_device() != current_device():
        with torch.cuda.device(query.get_device()):
            return attend(module, query, key, value, options)
    if why_watched() is not None or why_not_covered(module) is not None:
        return None
    if query.dim() == 2 and key.dim() == 2 and value.dim() == 2:
        return _unbatched(module, query, key, value, options)
    return _batched(module, query, key, value, options, module.batch_first)


def why_not_covered(module: nn.MultiheadAttention) -> str | None:
    """Say what of the module as it is now is torch's, or None."""
    if module.bias_k is not None or module.bias_v is not None:
        return "add_bias_kv is torch's"
    if module.add_zero_attn:
        return "add_zero_attn is torch's"
    out_proj = module.out_proj
    if type(out_proj) is not NonDynamicallyQuantizableLinear:
        return f"out_proj is a {type(out_proj).__name__}: torch decides what becomes of it"
    if out_proj._forward_hooks or out_proj._forward_pre_hooks or "forward" in out_proj.__dict__:
        return "out_proj has hooks or another forward: torch decides what becomes of them"
    if module._qkv_same_embed_dim:
        weights: tuple[Tensor | None, ...] = (module.in_proj_weight,)
    else:
        weights = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
    for weight in (*weights, module.in_proj_bias, out_proj.weight, out_proj.bias):
        if weight is not None and type(weight) not in PLAIN_TYPES:
            return f"a parameter is a {type(weight).__name__}, a tensor subclass"
    dtype = out_proj.weight.dtype
    if dtype not in DTYPES:
        return f"{dtype} is not among fp32, fp16 and bf16"
    return dispatch.why_not_head(module.head_dim, dtype)


def _unbatched(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, options: Options
) -> tuple[Tensor, Tensor | None] | None:
    q = query.unsqueeze(0)
    k = q if key is query else key.unsqueeze(0)
    v = k if value is key else value.unsqueeze(0)
    mask = options.key_padding_mask
    if mask is not None:
        if not isinstance(mask, Tensor) or mask.dim() != 1:
            return None
        options = options._replace(key_padding_mask=mask.unsqueeze(0))
    outputs = _batched(module, q, k, v, options, True, as_one=True)
    if outputs is None:
        return None
    y, weights = outputs
    return y.squeeze(0), None if weights is None else weights.squeeze(0)


def _batched(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    options: Options,
    batch_first: bool,
    as_one: bool = False,
) -> tuple[Tensor, Tensor | None] | None:
    if q.dim() != 3 or k.dim() != 3 or v.dim() != 3:
        return None
    swapped = (
        batch_first
        and q is k
        and k is v
        and not q.is_contiguous()
        and q.transpose(0, 1).is_contiguous()
    )
    if swapped:  # rows that lie the other way round are worked on as they lie, as in torch
        q = k = v = q.transpose(0, 1)
        batch_first = not batch_first
    batch, queries = q.shape[:2] if batch_first else (q.shape[1], q.shape[0])
    keys = k.shape[1] if batch_first else k.shape[0]
    sizes = (batch, module.num_heads, queries, keys)
    if _why_not_inputs(module, q, k, v, batch_first) is not None:
        return None
    dropout = float(module.dropout) if module.training else 0.0
    if options.need_weights and (dropout or not options.average_attn_weights):
        return None
    causal = options.is_causal
    key_padding_mask, attn_mask = options.key_padding_mask, options.attn_mask
    if causal:
        if attn_mask is None:
            return None  # which torch refuses
        # torch takes the hint at its word where it can do without the mask, else the mask.
        causal = key_padding_mask is None and not options.need_weights
        if masks.why_not_fitting(key_padding_mask, attn_mask, sizes, q.device) is not None:
            return None
        attn_mask = None if causal else attn_mask
    masked = key_padding_mask is not None or attn_mask is not None
    by_torchs_node = bool(dropout) and not masked
    dtype = product_type(q)
    if dispatch.why_torchs(queries, keys, dtype, by_torchs_node=by_torchs_node):
        return None
    if q.is_cuda and dispatch.why_not_precision(
        dtype, q.numel() // module.embed_dim, module.embed_dim, q.get_device()
    ):
        return None
    if dispatch.why_not_head(module.head_dim, dtype) is not None:  # under autocast
        return None
    if masked and masks.why_not_fitting(key_padding_mask, attn_mask, sizes, q.device) is not None:
        return None
    if (
        options.need_weights
        and masks.shifts_scores(key_padding_mask, attn_mask)
        and dispatch.why_not_shifted(queries, keys, module.head_dim) is not None
    ):
        return None
    inference = not module.training and _is_torchs_inference(
        module, q, k, v, key_padding_mask, attn_mask, module.batch_first and not as_one
    )
    if inference and not (
        dispatch.INSTEAD_OF_ONE_OPERATOR
        or dispatch.beats_one_operator(queries, keys, dtype, need_weights=options.need_weights)
    ):
        return None
    nan_rows = masked and (options.need_weights or inference)
    layout = Layout(module.num_heads, batch_first)
    products = project(module, q, k, v)
    masking = Masking(causal, attn_mask, key_padding_mask, None, nan_rows)
    rows, weights = attend_products(
        products, layout, masking, need_weights=options.need_weights, dropout=dropout
    )
    y = linear(rows, module.out_proj.weight, module.out_proj.bias)
    if weights is not None and q.is_cuda and torch.is_autocast_enabled("cuda"):
        weights = weights.float()  # as softmax is under autocast there
    return y.transpose(0, 1) if swapped else y, weights


def is_small_inference(
    module: nn.MultiheadAttention, query: Tensor, key: Tensor, value: Tensor, need_weights: bool
) -> bool:
    """Return whether no gradient is wanted and the call is too small to be faster here.

    Never with dropout in training: a checkpoint's first forward, which asks for no gradients, must
    draw the same as the one that is run again for them.
    """
    if type(query) not in PLAIN_TYPES or query.is_nested or query.dim() < 2:
        return False
    if module.training and module.dropout:
        return False
    least = (
        dispatch.LEAST_WORK_IN_INFERENCE if need_weights else dispatch.LEAST_WORK_WITHOUT_WEIGHTS
    )
    if query.numel() * query.shape[-1] >= least:
        return False
    if not torch.is_grad_enabled():
        return True
    if query.requires_grad or key.requires_grad or value.requires_grad:
        return False
    if getattr(getattr(module.out_proj, "weight", None), "requires_grad", False):
        return False  # also where something keeps the parameters elsewhere, as FSDP does
    return not any(parameter.requires_grad for parameter in module.parameters())


def product_type(q: Tensor) -> torch.dtype:
    """Return the type in which products are made; on the CPU, in tests, none that has a switch."""
    if not q.is_cuda:
        return torch.bfloat16
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else q.dtype


def _why_not_inputs(
    module: nn.MultiheadAttention, q: Tensor, k: Tensor, v: Tensor, batch_first: bool
) -> str | None:
    """Say what of the inputs' types and shapes is not covered, or None."""
    for x, width in ((q, module.embed_dim), (k, module.kdim), (v, module.vdim)):
        if x.is_nested or x.layout is not torch.strided or x.dtype not in DTYPES:
            return "an input is nested, sparse or of another type"
        if x.device != q.device or x.dtype != q.dtype or x.shape[-1] != width or not x.numel():
            return "an input has another device, type or width, or is empty"
    if k.shape[:2] != v.shape[:2] or q.shape[not batch_first] != k.shape[not batch_first]:
        return "lengths or batches do not fit"
    return None


def attend_products(
    products: list[Tensor],
    layout: Layout,
    masking: Masking,
    *,
    need_weights: bool,
    dropout: float,
) -> tuple[Tensor, Tensor | None]:
    """Attend from the input products to rows of the output, [B, L, E] or [L, B, E] by `layout`.

    Args:
        products: one, two or three, as `projections.project` makes them.
        layout: how they lie.
        masking: masks that `masks.why_not_fitting` has passed.
        need_weights: also return the weights averaged over heads, [B, L, S]; without dropout only.
        dropout: probability of dropping a weight.
    """
    q, k, v = layout.split(products)
    differentiable = torch.is_grad_enabled() and any(p.requires_grad for p in products)
    if differentiable:
        masking = masks.kept_apart(masking)
    if (
        not dropout
        and dispatch.is_ours(q, k, masking, differentiable or need_weights)
        and attention.supports(q, k, v, masking, differentiable=differentiable) is None
    ):
        return _short(products, layout, masking, need_weights)
    bias = masks.as_bias(masking, q, k)
    if dropout or not (differentiable or need_weights):
        out = dispatch.by_torchs_node(q, k, v, bias, masking.causal, dropout)
        return layout.join(out), None
    core = dispatch.core_for(q, k, v, bias, masking.causal)
    made = apply_attend(core, layout, bias, masking.causal, need_weights, *products)
    return made[0], made[1] if need_weights else None


def _short(
    products: list[Tensor], layout: Layout, masking: Masking, need_weights: bool
) -> tuple[Tensor, Tensor | None]:
    """Attend by our kernel."""
    wanted: Literal["averaged"] | None = "averaged" if need_weights else None
    heads, batch_first = layout
    if len(products) == 1:
        return attention.packed_attention(
            products[0], heads, masking, wanted, batch_first=batch_first
        )
    q, k, v = layout.split(products)
    out, weights = attention.attention(q, k, v, masking, wanted)
    return layout.join(out), weights


def _is_torchs_inference(
    module: nn.MultiheadAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_padding_mask: Tensor | None,
    attn_mask: Tensor | None,
    batch_first: bool,
) -> bool:
    """Return whether torch would take its inference path, given that training is off.

    It is one operator, and rows without a key become NaN there.
    """
    if not batch_first or q is not k or k is not v or module.num_heads % 2:
        return False
    if not module._qkv_same_embed_dim or module.in_proj_bias is None:
        return False
    if torch.is_autocast_enabled(q.device.type):
        return False
    if any(mask is not None and mask.is_floating_point() for mask in (key_padding_mask, attn_mask)):
        return False
    if not torch.backends.mha.get_fastpath_enabled():
        return False
    return not torch.is_grad_enabled() or not any(
        tensor is not None and tensor.requires_grad for tensor in (q, *module.parameters())
    )
