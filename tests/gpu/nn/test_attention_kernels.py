"""The attention kernels on a GPU: float64's results, every element written, the same bits twice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from hfai.kernels.attention import (
    Masking,
    formula,
    launch,
    packed_attention,
    supports,
    supports_packed,
)
from tests.kernels.attention.cases import (
    BF16,
    FP16,
    FP32,
    RANGES,
    TOLERANCES,
    Call,
    call,
    error,
    of_range,
    padding,
)


@pytest.fixture(autouse=True)
def _tf32() -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def run(case: Call) -> tuple[Tensor, ...]:
    q, k, v, masking = case.q, case.k, case.v, case.masking
    poisoned = [launch.like_rows(t).fill_(torch.nan) for t in (q, q, k, v)]
    out, lse = launch.attention_forward(q, k, v, masking, poisoned[0])
    targets = (poisoned[1], poisoned[2], poisoned[3])
    gradients = launch.attention_backward(case.dout, q, k, v, out, lse, masking, targets)
    averaged = launch.attention_weights(q, k, lse, masking, True)
    return (out, *gradients, launch.attention_weights(q, k, lse, masking, False), averaged)


def check(case: Call, tolerance: float | None = None) -> None:
    reason = supports(case.q, case.k, case.v, case.masking, differentiable=True)
    if reason is not None and "three-part" not in reason:
        assert "do not fit" in reason, reason
        pytest.skip(reason)
    made, again = run(case), run(case)
    assert all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(made, again, strict=True)
    )
    out, weights, gradients = case.expected()
    for one, expected in zip(made, (out, *gradients, weights, weights.mean(1)), strict=True):
        assert error(one, expected) < (tolerance or TOLERANCES[case.q.dtype])


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("length", [1, 16, 40, 64, 100, 128, 197, 256])
def test_every_length(dtype: torch.dtype, length: int) -> None:
    check(call(dtype, 2, length, length, 3, 64, packed=True, device="cuda"))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("head_dim", [8, 16, 32, 40, 72, 80, 96, 128])
@pytest.mark.parametrize("length", [64, 197])
def test_every_head_dimension(dtype: torch.dtype, head_dim: int, length: int) -> None:
    check(call(dtype, 2, length, length, 2, head_dim, device="cuda"))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize(("rows", "keys"), [(50, 200), (250, 30), (1, 77), (77, 1)])
def test_cross_attention(dtype: torch.dtype, rows: int, keys: int) -> None:
    check(call(dtype, 2, rows, keys, 2, 64, sequence_first=True, device="cuda"))


@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("length", [64, 130])
@pytest.mark.parametrize("kind", ["causal", "padding", "mask", "all", "zeros", "nan"])
def test_every_mask(dtype: torch.dtype, length: int, kind: str) -> None:
    generator = torch.Generator("cuda").manual_seed(1)
    mask = torch.randn(length, length, generator=generator, device="cuda")
    mask[:, 1::3] = -torch.inf
    empty = torch.arange(length, device="cuda")[:, None].expand(length, length) % 3 == 0
    masking = {
        "causal": Masking(causal=True),
        "padding": Masking(key_padding_mask=padding(2, length, "cuda")),
        "mask": Masking(attn_mask=mask),
        "all": Masking(True, mask.to(dtype), padding(2, length, "cuda")),
        "zeros": Masking(attn_mask=empty),
        "nan": Masking(attn_mask=empty, nan_rows=True),
    }[kind]
    check(call(dtype, 2, length, length, 2, 64, masking=masking, device="cuda"))


@pytest.mark.parametrize("length", [16, 64, 100, 197, 256])
def test_fp32_without_tf32_is_as_accurate_as_torch(length: int) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    case = call(FP32, 2, length, length, 3, 64, packed=True, device="cuda")
    out, _, gradients = case.expected()
    inputs = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    theirs = formula.attention(*inputs, case.masking)[0]
    found = torch.autograd.grad(theirs, inputs, case.dout)
    for ours, torchs, expected in zip(run(case), (theirs, *found), (out, *gradients), strict=False):
        assert error(ours, expected) < 1.5 * error(torchs, expected)


@pytest.mark.parametrize("length", [64, 256])
@pytest.mark.parametrize("kind", RANGES)
def test_fp32_with_tf32_is_as_accurate_as_torch_of_all_ranges(kind: str, length: int) -> None:
    case = of_range(kind, length, device="cuda")
    out, _, gradients = case.expected()
    inputs = [t.detach().requires_grad_() for t in (case.q, case.k, case.v)]
    theirs = formula.attention(*inputs, case.masking)[0]
    found = torch.autograd.grad(theirs, inputs, case.dout)
    for ours, torchs, expected in zip(run(case), (theirs, *found), (out, *gradients), strict=False):
        assert error(ours, expected, 0.0) < 1.5 * error(torchs, expected, 0.0)


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_packed_product_as_torch_computes_it(batch_first: bool) -> None:
    qkv = torch.randn(6, 64, 3 * 256, device="cuda", dtype=BF16, requires_grad=True)
    assert supports_packed(qkv, 4, batch_first=batch_first) is None
    out, _ = packed_attention(qkv, 4, batch_first=batch_first)
    dout = torch.randn_like(out)
    (found,) = torch.autograd.grad(out, qkv, dout)
    view = qkv.double() if batch_first else qkv.double().transpose(0, 1)
    q, k, v = (t.transpose(1, 2) for t in view.unflatten(2, (3, 4, 64)).unbind(2))
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
    expected = expected if batch_first else expected.transpose(0, 1)
    assert error(out, expected) < TOLERANCES[BF16]
    (wanted,) = torch.autograd.grad(expected, qkv, dout.double())
    assert error(found, wanted) < TOLERANCES[BF16]


def test_more_heads_than_65535_blocks() -> None:
    case = call(BF16, 9000, 8, 8, 8, 8, packed=True, device="cuda")
    out, _ = launch.attention_forward(case.q, case.k, case.v, case.masking)
    assert error(out, case.expected()[0]) < TOLERANCES[BF16]
