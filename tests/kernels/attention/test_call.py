"""What is covered is said beforehand, with a reason, and never by an error of a kernel's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hfai.kernels.attention import Masking, call, plan, supports, supports_packed
from hfai.kernels.attention.hopper import HopperBackwardPlan
from tests.kernels.compiled import DEVICES


def heads(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def test_a_cpu_tensor_is_torchs() -> None:
    q = heads(2, 16, 4, 64)
    assert "on cpu" in str(supports(q, q, q))
    assert "on cpu" in str(supports_packed(heads(2, 16, 768), 4))


@pytest.mark.parametrize(
    ("q", "k", "reason"),
    [
        ((2, 16, 4, 64), (2, 300, 4, 64), "at most 256"),
        ((2, 257, 4, 64), (2, 16, 4, 64), "at most 256"),
        ((2, 16, 4, 60), (2, 16, 4, 60), "multiple of 8"),
        ((2, 16, 4, 136), (2, 16, 4, 136), "up to 128"),
        ((2, 0, 4, 64), (2, 16, 4, 64), "nothing to compute"),
        ((2, 16, 4, 64), (2, 16, 2, 64), "do not fit together"),
        ((2, 16, 64), (2, 16, 64), "not [batch, rows, heads, head_dim]"),
    ],
)
def test_shapes_that_are_torchs(q: tuple[int, ...], k: tuple[int, ...], reason: str) -> None:
    assert reason in str(call.why_not_shapes(heads(*q), heads(*k), heads(*k)))


def test_every_layout_whose_rows_start_on_16_bytes_is_covered() -> None:
    packed = heads(16, 2, 3 * 4 * 64)
    for batch_first in (True, False):
        q, k, v = call.unpack(packed, 4, batch_first)
        assert q.shape == ((16, 2, 4, 64) if batch_first else (2, 16, 4, 64))
        assert q.data_ptr() == packed.data_ptr()
        assert call.why_not_shapes(q, k, v) is None
    odd = heads(2 * 16 * 4 * 64 + 1)[1:].view(2, 16, 4, 64)
    assert "16 bytes" in str(call.why_not_shapes(odd, odd, odd))
    across = heads(2, 16, 64, 4).transpose(2, 3)
    assert "side by side" in str(call.why_not_shapes(across, across, across))


@pytest.mark.parametrize(
    ("masking", "reason"),
    [
        (Masking(attn_mask=torch.zeros(8, 9)), "does not fit"),
        (Masking(attn_mask=torch.zeros(3, 8, 8)), "does not fit"),
        (Masking(attn_mask=torch.zeros(8, 8, dtype=torch.int32)), "torch.int32"),
        (Masking(attn_mask=torch.zeros(8, 8, dtype=torch.float64)), "torch.float64"),
        (Masking(attn_mask=torch.zeros(8, 8, requires_grad=True)), "requires a gradient"),
        (Masking(key_padding_mask=torch.zeros(8)), "key_padding_mask has shape"),
        (Masking(scale=0.0), "above zero"),
        (Masking(scale=float("nan")), "above zero"),
    ],
)
def test_masks_that_are_torchs(masking: Masking, reason: str) -> None:
    q = heads(2, 8, 4, 64)
    assert reason in str(call.why_not_masks(q, q, masking))


def test_a_mask_made_under_inference_mode_is_torchs_in_training() -> None:
    q = heads(2, 8, 4, 64)
    with torch.inference_mode():
        masking = Masking(attn_mask=torch.zeros(8, 8))
    assert "inference_mode" in str(call.why_not_masks(q, q, masking))
    with torch.no_grad():
        assert call.why_not_masks(q, q, masking) is None


@pytest.mark.parametrize("shape", [(8, 8), (8, 8, 8), (1, 1, 8, 8), (2, 1, 8, 8), (1, 4, 8, 8)])
def test_masks_that_broadcast_are_covered(shape: tuple[int, ...]) -> None:
    q = heads(2, 8, 4, 64)
    assert call.why_not_masks(q, q, Masking(attn_mask=torch.zeros(shape))) is None


def test_shapes_that_do_not_fit_a_device_are_torchs() -> None:
    hopper, ada = DEVICES["sm_90"], DEVICES["sm_89"]
    assert call.why_no_plan(64, torch.bfloat16, 256, 256, hopper, True) is None
    reason = call.why_no_plan(128, torch.float32, 256, 256, hopper, False)
    assert "do not fit" in str(reason)
    assert "backward" in str(call.why_no_plan(64, torch.bfloat16, 256, 256, ada, True))


@pytest.mark.parametrize("architecture", DEVICES)
def test_plans_take_all_rows_and_keys_and_fit(architecture: str) -> None:
    limits = DEVICES[architecture]
    for length in (1, 16, 40, 64, 100, 197, 256):
        for head in (8, 64, 80, 128):
            forward = plan.choose_forward(head, torch.float16, length, length, limits)
            if forward is not None:
                assert forward.chunk * forward.chunks >= length
                assert forward.shared_bytes <= limits.shared_bytes_per_block
            backward = plan.choose_backward(head, torch.float16, length, length, limits)
            if backward is not None:
                rows = 64 if isinstance(backward, HopperBackwardPlan) else 16 * backward.warps
                assert rows * backward.row_tiles >= length
                assert backward.key_block * backward.key_blocks >= length
                assert backward.shared_bytes <= limits.shared_bytes_per_block
            assert (forward is not None and backward is not None) or length > 128
