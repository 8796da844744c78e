"""Which core a call runs on.

As measured on an H200 (docs/attention.md): in half precision our kernel is the fastest up to 64
queries and keys, both ways; from there to 256 cuDNN's forward is faster, and our backward about as
fast as cuDNN's and without the copy that gathers three gradients into one. In fp32 with TF32 it is
the fastest up to 256, both ways. What it leaves goes to the operator that torch itself would
choose, by torch's own switches (`torch.nn.attention.sdpa_kernel`), with known faults routed around.
What was slower there, or has not been measured, is left to torch's own forward: `why_torchs`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels import attention
from hfai.kernels.attention import Masking, plan
from hfai.kernels.attention.precision import allows_tf32
from hfai.kernels.mha.cores import Core, Cudnn, Efficient, Flash, OnCpu, ThenOurs, Unfused
from hfai.kernels.products import why_not_size

FLASH, EFFICIENT, CUDNN, ON_CPU, UNFUSED = Flash(), Efficient(), Cudnn(), OnCpu(), Unfused()
# By the numbers of torch's own enumeration, torch.nn.attention.SDPBackend.
_BACKENDS: dict[int, Core] = {1: FLASH, 2: EFFICIENT, 3: CUDNN}
_THEN_OURS: dict[Core, Core] = {core: ThenOurs(core) for core in (FLASH, EFFICIENT, CUDNN)}
MOST_HEAD_DIM = 128  # beyond it no kernel of ours reaches, and nothing has been timed
# Multiply-adds of a product of E by E below which calls without gradients are torch's: those of the
# smallest cases in which ours was timed and faster (benchmarks/layers.py), 32 sequences of 512 rows
# of 1024 where weights are wanted, else 200 of 256 rows. On less it is the host that one waits for.
LEAST_WORK_IN_INFERENCE = 32 * 512 * 1024**2
LEAST_WORK_WITHOUT_WEIGHTS = 200 * 256 * 1024**2
# Whether calls in evaluation for which torch has one operator for the whole module run here even
# where `beats_one_operator` says nothing for it; tests set it.
INSTEAD_OF_ONE_OPERATOR = False
# Queries or keys beyond which calls are torch's, a guard that nothing reaches in practice: torch's
# fused operators count positions in 32 bits.
LONGEST = 1 << 20
# Whether fp32 without TF32 runs here even where the products are torch's, which is what decides:
# with those the module was measured at 0.92 to 1.04 times torch's speed, with ours at twice. Tests
# set it.
WITHOUT_TF32 = False
MANY_ROWS = 1 << 16  # of which products are large, whatever the number of features

# Queries and keys up to which our forward is the fastest in half precision.
MOST_ROWS_FORWARD = 64
# Whether our backward follows torch's forward beyond that, as far as it reaches.
OURS_BACKWARD = True
# For heads up to this size: cuDNN's took 0.81 to 0.84 of our time at 100 rows of 80 and 256 of 128.
MOST_HEAD_DIM_BACKWARD = 64


def why_torchs(queries: int, keys: int, dtype: torch.dtype, *, by_torchs_node: bool) -> str | None:
    """Say why a call that could run here is left to torch's own forward, or None.

    Args:
        queries: queries of a sequence.
        keys: keys of a sequence.
        dtype: in which products are made.
        by_torchs_node: whether weights are dropped and nothing is masked. Such calls run torch's
            own node at any length (measured in BERT-large's step of 512 rows).
    """
    if max(queries, keys) > LONGEST and not by_torchs_node:
        return f"{queries} queries, {keys} keys: longer than what was measured, {LONGEST}"
    return None


def beats_one_operator(queries: int, keys: int, dtype: torch.dtype, *, need_weights: bool) -> bool:
    """Return whether a large call is faster here than as torch's one operator for evaluation.

    In half precision ours took 0.57 (64 rows) and 0.66 (512 rows) of its time with weights; without
    them 0.80 of it with 64 rows and 1.02 with 512. In fp32 with TF32 none was measured, without it
    0.52 to 0.60 of its time (64 and 256 rows).
    """
    if dtype is torch.float32:
        return not allows_tf32()
    return need_weights or max(queries, keys) <= MOST_ROWS_FORWARD


def why_not_precision(dtype: torch.dtype, rows: int, features: int, device: int) -> str | None:
    """Say why calls whose products are of a type are left to torch, or None.

    Args:
        dtype: in which products are made.
        rows: of all sequences.
        features: of a row.
        device: its index.
    """
    if dtype is not torch.float32 or WITHOUT_TF32 or allows_tf32():
        return None
    reason = why_not_size(rows, features, features, device)
    if reason is None:
        return None
    return (
        f"fp32 without TF32, in which torch's own is as fast where its products are ({reason}): "
        "allow TF32 (torch.backends.cuda.matmul.allow_tf32 = True) or use autocast"
    )


def is_ours(q: Tensor, k: Tensor, masking: Masking, needs_sums: bool) -> bool:
    """Return whether our kernel runs a call in both directions, if it covers it.

    Args:
        q: [B, L, H, D].
        k: [B, S, H, D].
        masking: masks of the call.
        needs_sums: whether backward or the weights will follow, which need each row's sum.
    """
    if max(q.shape[1], k.shape[1]) <= MOST_ROWS_FORWARD or q.dtype is torch.float32:
        return True
    masked = masking.attn_mask is not None or masking.key_padding_mask is not None
    return masked and needs_sums  # what torch's leave of a row without keys, or lowered, differs


def why_not_shifted(queries: int, keys: int, head: int) -> str | None:
    """Say why weights under a mask of numbers are left to torch's own forward, or None.

    torch's fused operators leave one number for each row, its highest score and its sum in one:
    where a mask has lowered a whole row by 1e9, the sum is lost. Our kernel keeps them apart.
    """
    if max(queries, keys) > plan.MOST_KEYS or head % 8 or head > plan.MOST_HEAD_DIM:
        return (
            f"weights under a mask of numbers, {queries} queries, {keys} keys and a head "
            f"dimension of {head}: up to {plan.MOST_KEYS}, and multiples of 8, run here"
        )
    return None


def why_not_head(head: int, dtype: torch.dtype) -> str | None:
    """Say why torch's fused operators do not take heads of this size as they lie, or None."""
    unit = 4 if dtype is torch.float32 else 8
    if head % unit or head > MOST_HEAD_DIM:
        return f"a head dimension of {head} is no multiple of {unit} up to {MOST_HEAD_DIM}"
    return None


def core_for(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool) -> Core:
    """Return the core for these heads, [B, length, H, D]."""
    core = torchs_core(q, k, v, bias, causal, 0.0)
    if (
        OURS_BACKWARD
        and q.shape[3] <= MOST_HEAD_DIM_BACKWARD
        and bias is None
        and core in _THEN_OURS
        and q.is_cuda
        and torch.is_grad_enabled()
        and (q.requires_grad or k.requires_grad or v.requires_grad)
        and attention.supports(q, k, v, Masking(causal)) is None
    ):
        return _THEN_OURS[core]
    return core


def torchs_core(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float
) -> Core:
    """Return which of torch's operators runs a call."""
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    # 0 where the user has switched all fused ones off, or for heads that none takes.
    core = _BACKENDS.get(torch._fused_sdp_choice(*heads, bias, dropout, causal), UNFUSED)
    if core is not UNFUSED and not q.is_cuda:
        return ON_CPU
    if core is CUDNN and bias is not None and q.shape[1] % 128 == 64:
        # Gradients of q may be NaN there: https://github.com/pytorch/pytorch/issues/196678
        return EFFICIENT
    return core


def by_torchs_node(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, dropout: float
) -> Tensor:
    """Attend without a node of ours: where no gradient is wanted, or weights are dropped.

    Returns:
        The output, [B, L, H, D], differentiable once.
    """
    heads = (q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
    keeps = torch.is_grad_enabled() and q.requires_grad
    if keeps and bias is not None and torchs_core(q, k, v, bias, causal, dropout) is EFFICIENT:
        bias = bias.expand(*heads[0].shape[:3], k.shape[1])
        out = torch.ops.aten._scaled_dot_product_efficient_attention.default(
            *heads, bias, True, dropout, causal
        )[0]
    else:
        q, k, v = heads
        out = F.scaled_dot_product_attention(q, k, v, bias, dropout, causal)
    result: Tensor = out.transpose(1, 2)
    return result
