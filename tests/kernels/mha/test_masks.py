"""Masks become one bias: as small as they allow, aligned, of q's type, NaN where asked for."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from hfai.kernels.attention import Masking
from hfai.kernels.mha import dispatch
from hfai.kernels.mha.masks import ALIGNMENT, as_bias, shifts_scores

B, H, L, S = 2, 3, 4, 5


def bias(masking: Masking, dtype: torch.dtype = torch.float32, keys: int = S) -> Tensor | None:
    return as_bias(
        masking, torch.zeros(B, L, H, 8, dtype=dtype), torch.zeros(B, keys, H, 8, dtype=dtype)
    )


def padding(keys: int = S) -> Tensor:
    return torch.arange(keys) >= torch.tensor([keys, 2])[:, None]


def test_no_mask_is_no_bias() -> None:
    assert bias(Masking()) is None
    assert bias(Masking(causal=True)) is None


@pytest.mark.parametrize("keys", [5, 16, 33])
def test_a_bias_is_as_small_as_its_masks_and_aligned(keys: int) -> None:
    square = torch.zeros(L, keys, dtype=torch.bool)
    of_heads = torch.zeros(B * H, L, keys)
    for masking, shape in (
        (Masking(key_padding_mask=padding(keys)), (B, 1, 1, keys)),
        (Masking(attn_mask=square), (1, 1, L, keys)),
        (Masking(attn_mask=of_heads), (B, H, L, keys)),
        (Masking(attn_mask=square, key_padding_mask=padding(keys)), (B, 1, L, keys)),
    ):
        made = bias(masking, keys=keys)
        assert made is not None
        assert made.shape == shape
        assert made.stride(-1) == 1
        assert made.stride(-2) % ALIGNMENT == 0 or made.shape[-2] == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_bool_masks_add_nothing_or_minus_infinity_in_the_type_of_q(dtype: torch.dtype) -> None:
    made = bias(Masking(key_padding_mask=padding()), dtype)
    assert made is not None
    assert made.dtype is dtype
    assert torch.equal(made[:, 0, 0] == -math.inf, padding())
    assert not made[:, 0, 0][~padding()].any()


def test_float_masks_are_added_up_and_cast() -> None:
    one, other = torch.randn(L, S, dtype=torch.float64), torch.randn(B, S, dtype=torch.float64)
    made = bias(Masking(attn_mask=one, key_padding_mask=other))
    expected = (one[None, None] + other[:, None, None]).float()
    torch.testing.assert_close(made, expected)


@pytest.mark.parametrize("keys", [5, 16])
def test_rows_without_a_key_are_nan_where_that_is_wanted_and_the_mask_stays(keys: int) -> None:
    mask = torch.zeros(L, keys)
    mask[1] = -math.inf
    before = mask.clone()
    made = bias(Masking(attn_mask=mask, nan_rows=True), keys=keys)
    assert made is not None
    assert made[0, 0, 1].isnan().all()
    assert not made[0, 0, [0, 2, 3]].any()
    assert torch.equal(mask, before)
    kept = bias(Masking(attn_mask=mask), keys=keys)
    assert kept is not None
    assert torch.equal(kept[0, 0], mask)


def test_only_masks_of_numbers_shift_scores_and_leave_long_rows_to_torch() -> None:
    numbers = torch.zeros(L, S)
    assert shifts_scores(None, numbers)
    assert shifts_scores(torch.zeros(B, S), None)
    assert not shifts_scores(padding(), numbers.bool())
    assert not shifts_scores(None, None)
    assert dispatch.why_not_shifted(256, 256, 64) is None
    assert "300 keys" in str(dispatch.why_not_shifted(20, 300, 64))
    assert "dimension of 60" in str(dispatch.why_not_shifted(20, 20, 60))
