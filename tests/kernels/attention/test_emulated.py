"""The kernels' own sources, run thread by thread on the CPU, compute what float64 does."""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.attention import launch, precision, programs
from hfai.kernels.attention.masking import Masking
from tests.kernels.attention import emulated
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
from tests.kernels.compiled import DEVICES

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++ for the emulation")


def use_tf32(monkeypatch: pytest.MonkeyPatch, allowed: bool) -> None:
    """Set what torch's switch says, without turning it: its setting is the process's."""
    monkeypatch.setattr(precision, "allows_tf32", lambda: allowed)


@pytest.fixture(autouse=True)
def _emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the emulator where programs are compiled and loaded, with a Hopper's limits."""

    def load(
        name: str, plan: Any, dtype: torch.dtype, device: int, constants: Any
    ) -> emulated.EmulatedKernel:
        sources, constants = programs.sources_of(plan), plan.constants() | constants
        types = programs.types_of(plan, dtype)
        return emulated.load(sources, constants, types, name, plan.threads, plan.shared_bytes)

    monkeypatch.setattr(programs, "_load", load)
    for kept in ("_forward", "_backward", "_weights"):
        monkeypatch.setattr(programs, kept, {})
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_90"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    use_tf32(monkeypatch, True)


def check(case: Call, *, weights: bool = True, tolerance: float | None = None) -> None:
    q, k, v, masking = case.q, case.k, case.v, case.masking
    out, expected_weights, gradients = case.expected()
    tolerance = TOLERANCES[q.dtype] if tolerance is None else tolerance
    made, lse = launch.attention_forward(q, k, v, masking, _poisoned(q))
    assert error(made, out) < tolerance
    targets = (_poisoned(q), _poisoned(k), _poisoned(v))
    found = launch.attention_backward(case.dout, q, k, v, made, lse, masking, targets)
    for gradient, expected in zip(found, gradients, strict=True):
        assert error(gradient, expected) < tolerance
    if weights:
        each = launch.attention_weights(q, k, lse, masking, False)
        assert error(each, expected_weights) < tolerance
        averaged = launch.attention_weights(q, k, lse, masking, True)
        assert error(averaged, expected_weights.mean(1)) < tolerance


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    return launch.like_rows(like).fill_(float("nan"))


def packed_call(dtype: torch.dtype) -> Call:
    """Return a case that several tests share, as compiling its kernels is what takes the time."""
    return call(dtype, 1, 40, 40, 2, 24, packed=True)


@pytest.mark.parametrize("dtype", [BF16, FP32])
def test_a_packed_product(dtype: torch.dtype) -> None:
    check(packed_call(dtype), weights=False)


def test_fp32_without_tf32_keeps_its_own_accuracy(monkeypatch: pytest.MonkeyPatch) -> None:
    use_tf32(monkeypatch, False)
    # `supports` leaves such calls to torch: four more kernels to compile are for the long run.
    weights = "HFAI_LONG_TESTS" in os.environ
    check(call(FP32, 1, 40, 70, 1, 24), weights=weights, tolerance=1e-6)


def test_keys_in_several_parts_with_all_masks_at_once() -> None:
    mask = torch.randn(130, 130, generator=torch.Generator().manual_seed(1)).to(BF16)
    mask[:, 1::3] = -torch.inf
    masking = Masking(True, mask, padding(2, 130))
    check(call(BF16, 2, 130, 130, 1, 16, masking=masking), weights=False)


@pytest.mark.parametrize(
    ("rows", "keys", "head_dim", "dtype"),
    [(256, 256, 64, BF16), (70, 203, 40, FP16), (130, 180, 56, FP32), (100, 60, 64, FP32)],
)
def test_warpgroups(rows: int, keys: int, head_dim: int, dtype: torch.dtype) -> None:
    case = call(dtype, 1, rows, keys, 2, head_dim, masking=Masking(causal=rows == keys))
    case.q[:, ::3] *= 4.0  # of some rows later keys have far higher scores than the first ones
    assert programs.architecture_of(programs.backward(case.q, case.k, case.masking).plan)
    check(case, weights=False)
    _, lse = launch.attention_forward(case.q, case.k, case.v, case.masking)
    averaged = launch.attention_weights(case.q, case.k, lse, case.masking, True)
    assert error(averaged, case.expected()[1].mean(1)) < TOLERANCES[dtype]


def in_tf32(case: Call) -> tuple[torch.Tensor, ...]:
    """Return out, dq, dk and dv as products of operands rounded to TF32 give them."""

    def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a, b = ((t.contiguous().view(torch.int32) + 0x1000 & ~0x1FFF).view(FP32) for t in (a, b))
        return a @ b

    q, k, v, dout = (t.transpose(1, 2) for t in (case.q, case.k, case.v, case.dout))
    q = q * q.shape[-1] ** -0.5
    weights = multiply(q, k.mT).softmax(-1)
    dweights = multiply(dout, v.mT)
    dscores = weights * (dweights - (dweights * weights).sum(-1, keepdim=True))
    made = (
        multiply(weights, v),
        multiply(dscores, k) * q.shape[-1] ** -0.5,
        multiply(dscores.mT, q),
        multiply(weights.mT, dout),
    )
    return tuple(t.transpose(1, 2) for t in made)


@pytest.mark.parametrize("length", [64, 96])
@pytest.mark.parametrize("kind", RANGES)
def test_fp32_as_scaled_fp16_is_as_accurate_as_tf32(kind: str, length: int) -> None:
    case = of_range(kind, length)
    out, _, gradients = case.expected()
    made, lse = launch.attention_forward(case.q, case.k, case.v, case.masking)
    found = launch.attention_backward(case.dout, case.q, case.k, case.v, made, lse, case.masking)
    for ours, theirs, exact in zip((made, *found), in_tf32(case), (out, *gradients), strict=True):
        assert error(ours, exact, 0.0) < 1.5 * error(theirs, exact, 0.0)


def test_fp32_as_scaled_fp16_keeps_infinity_and_nan_where_they_are() -> None:
    case = call(FP32, 1, 96, 96, 2, 64)
    case.q[0, 3, 0, 5] = torch.nan
    case.v[0, 7, 1, 9] = torch.inf
    case.dout[0, 11, 1, 13] = -torch.inf
    made, lse = launch.attention_forward(case.q, case.k, case.v, case.masking)
    wrong = ~made.isfinite()[0]
    assert made[0, 3, 0].isnan().all()
    assert made[0, :, 1, 9].isposinf().all()
    assert wrong.sum() == 64 + 96
    dq, dk, dv = launch.attention_backward(
        case.dout, case.q, case.k, case.v, made, lse, case.masking
    )
    assert dv[0, :, 1, 13].isneginf().all()
    assert dv[0, :, 0].isnan().all()  # a row of weights that are NaN
    assert (~dv[0, :, 1].isfinite()).sum() == 96
    expected = case.expected()[2]
    for ours, exact in zip((dq, dk, dv), expected, strict=True):
        assert torch.equal(ours.isfinite(), exact.isfinite())


def test_a_mask_of_each_head_and_sequence_first() -> None:
    mask = torch.randn(4, 30, 23, generator=torch.Generator().manual_seed(1))
    masking = Masking(attn_mask=mask, scale=0.3)
    check(call(FP32, 2, 30, 23, 2, 8, sequence_first=True, masking=masking))


def test_rows_without_any_key_get_zeros_and_no_gradient() -> None:
    mask = torch.arange(20)[:, None].expand(20, 37) % 3 == 0
    check(call(FP16, 1, 20, 37, 1, 8, masking=Masking(attn_mask=mask)), weights=False)


def test_rows_without_any_key_get_nan_where_that_is_asked_for() -> None:
    mask = torch.arange(20)[:, None].expand(20, 37) % 3 == 0
    case = call(FP16, 1, 20, 37, 1, 8, masking=Masking(attn_mask=mask, nan_rows=True))
    check(case, weights=False)
    made, _ = launch.attention_forward(case.q, case.k, case.v, case.masking)
    assert torch.equal(made.isnan().all(-1).all(-1)[0], mask[:, 0])


@pytest.mark.parametrize("length", [24, 80])
@pytest.mark.parametrize("added", [-1e9, torch.finfo(torch.float32).min])
def test_rows_whose_keys_are_all_masked_by_a_number_weigh_them_equally(
    added: float, length: int
) -> None:
    mask = torch.zeros(length, length)
    mask[::3] = added  # padding on the left of a causal model, say
    mask[1::3, ::2] = added
    padded = torch.zeros(1, length)
    padded[:, 4:7] = torch.finfo(torch.float32).min / 2
    masking = Masking(attn_mask=mask, key_padding_mask=padded if added == -1e9 else None)
    case = call(BF16, 1, length, length, 1, 64, masking=masking)
    # In fp32 a score is lost beside such a number, so every one of those keys has the same.
    scores = (case.q.float().transpose(1, 2) @ case.k.float().permute(0, 2, 3, 1)) / 8 + mask
    if masking.key_padding_mask is not None:
        scores = scores + padded
    weights = scores.softmax(-1)
    made, lse = launch.attention_forward(case.q, case.k, case.v, masking)
    assert error(made, (weights @ case.v.float().transpose(1, 2)).transpose(1, 2)) < 1e-2
    found = launch.attention_weights(case.q, case.k, lse, masking, False)
    assert error(found, weights) < 1e-2
    gradients = launch.attention_backward(case.dout, case.q, case.k, case.v, made, lse, masking)
    dvalues = weights.transpose(2, 3) @ case.dout.float().transpose(1, 2)
    assert error(gradients[2], dvalues.transpose(1, 2)) < 1e-2


def test_one_logarithm_a_row_is_refused_where_masks_add_numbers() -> None:
    case = call(BF16, 1, 40, 40, 1, 24, masking=Masking(attn_mask=torch.zeros(40, 40)))
    q, k, v = case.q, case.k, case.v
    with pytest.raises(ValueError, match="masks that add numbers"):
        launch.attention_backward(case.dout, q, k, v, None, torch.zeros(1, 1, 40), case.masking)


def test_an_infinite_or_nan_input_stays_in_its_own_head() -> None:
    case = packed_call(BF16)
    case.q[0, 3, 0, 0] = torch.nan
    made, lse = launch.attention_forward(case.q, case.k, case.v, case.masking)
    assert made[0, 3, 0].isnan().all()
    assert lse[0, 0, 3].isnan()
    assert made.isnan().sum() == 24


def test_an_output_gradient_of_any_layout_is_taken() -> None:
    case = packed_call(FP32)
    made = launch.attention_forward(case.q, case.k, case.v, case.masking)
    operands = (case.q, case.k, case.v, *made, case.masking)
    expected = launch.attention_backward(case.dout, *operands)
    off_by_one = case.dout.new_empty(case.dout.numel() + 1)[1:].view_as(case.dout)
    across = case.dout.transpose(0, 3).contiguous().transpose(0, 3)
    for dout in (off_by_one.copy_(case.dout), across):
        assert launch.why_not_rows(dout) is not None
        found = launch.attention_backward(dout, *operands)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_the_same_bits_come_out_twice() -> None:
    case = packed_call(FP32)
    q, k, v, masking = case.q, case.k, case.v, case.masking
    made = [launch.attention_forward(q, k, v, masking) for _ in range(2)]
    found = [launch.attention_backward(case.dout, q, k, v, *one, masking) for one in made]
    assert torch.equal(made[0][0], made[1][0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.skipif("HFAI_LONG_TESTS" not in os.environ, reason="minutes; set HFAI_LONG_TESTS=1")
@pytest.mark.parametrize("seed", range(60))
def test_random_calls(seed: int) -> None:
    draw = random.Random(seed)
    dtype = draw.choice([BF16, FP16, FP32])
    rows, keys = (draw.choice([1, 7, 16, 33, 64, 65, 100, 129, 197, 256]) for _ in range(2))
    batch, heads = draw.choice([1, 2]), draw.choice([1, 3])
    head_dim = draw.choice([8, 16, 40, 64, 72, 80] + ([96, 128] if dtype is not FP32 else []))
    generator = torch.Generator().manual_seed(seed)
    mask = torch.randn(rows, keys, generator=generator)
    mask = draw.choice([None, mask, mask.to(dtype), mask > 1])
    padded = draw.choice([None, padding(batch, keys), padding(batch, keys).to(dtype) * -1e4])
    causal, nan_rows = draw.choice([(True, False), (False, False), (False, True)])
    masking = Masking(causal, mask, padded, nan_rows=nan_rows)
    check(call(dtype, batch, rows, keys, heads, head_dim, masking=masking, seed=seed))
