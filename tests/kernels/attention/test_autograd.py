"""The autograd nodes: one gradient for a packed product, double backward, gradients into weights.

Kernels are stood in for by the formula, in float64; what they compute is held to the same formula
in test_emulated.py and on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hfai.kernels.attention import Masking, attention, autograd, formula, launch, packed_attention


@pytest.fixture(autouse=True)
def kernels_by_formula(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    calls: list[str] = []

    def forward(q: Tensor, k: Tensor, v: Tensor, masking: Masking, out: Any = None) -> Any:
        calls.append("forward")
        made = formula.attention(q, k, v, masking)[0]
        made = made if out is None else out.copy_(made)
        return made, made.new_zeros(q.shape[0], q.shape[2], q.shape[1])

    def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        calls.append("backward")
        masking, targets = rest[2], rest[3] if len(rest) > 3 else (None,) * 3
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            found = torch.autograd.grad(formula.attention(*inputs, masking)[0], inputs, dout)
        return tuple(g if t is None else t.copy_(g) for g, t in zip(found, targets, strict=True))

    def weights(q: Tensor, k: Tensor, lse: Tensor, masking: Masking, averaged: bool) -> Tensor:
        made = formula.attention(q, k, k, masking)[1]
        return made.mean(1) if averaged else made

    monkeypatch.setattr(launch, "attention_forward", forward)
    monkeypatch.setattr(launch, "attention_backward", backward)
    monkeypatch.setattr(launch, "attention_weights", weights)
    monkeypatch.setattr(launch, "needs_out", lambda *a: True)
    monkeypatch.setattr(autograd, "why_not_plain", lambda tensor: None)  # "it is on the CPU"
    return calls


def random(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()


@pytest.mark.parametrize("batch_first", [True, False])
def test_a_packed_product_gets_one_gradient(
    batch_first: bool, kernels_by_formula: list[str]
) -> None:
    qkv = random(3, 4, 3 * 2 * 8)
    out, none = packed_attention(qkv, 2, batch_first=batch_first)
    assert none is None
    assert out.is_contiguous()
    dout = random(3, 4, 16).detach()
    (found,) = torch.autograd.grad(out, qkv, dout)
    assert kernels_by_formula == ["forward", "backward"]
    view = qkv if batch_first else qkv.transpose(0, 1)
    q, k, v = view.unflatten(2, (3, 2, 8)).unbind(2)
    expected = formula.attention(q, k, v, Masking())[0].flatten(2)
    expected = expected if batch_first else expected.transpose(0, 1)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(found, torch.autograd.grad(expected, qkv, dout)[0])


def test_only_what_needs_a_gradient_gets_one() -> None:
    q, k, v = random(2, 3, 2, 8), random(2, 5, 2, 8).detach(), random(2, 5, 2, 8)
    out, _ = attention(q, k, v)
    out.sum().backward()
    assert q.grad is not None
    assert k.grad is None
    assert v.grad is not None


@pytest.mark.parametrize("kind", ["averaged", "heads"])
def test_a_gradient_into_the_weights(kind: Any) -> None:
    q, k, v = random(2, 3, 2, 8), random(2, 5, 2, 8), random(2, 5, 2, 8)
    out, weights = attention(q, k, v, weights=kind)
    assert weights is not None
    expected_out, each = formula.attention(q, k, v, Masking())
    expected = each.mean(1) if kind == "averaged" else each
    loss = (out**2).sum() + (weights**3).sum()
    expected_loss = (expected_out**2).sum() + (expected**3).sum()
    found = torch.autograd.grad(loss, (q, k, v))
    wanted = torch.autograd.grad(expected_loss, (q, k, v))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    alone = attention(q, k, v, weights=kind)[1]
    assert alone is not None
    assert torch.autograd.grad(alone.sum(), v, allow_unused=True)[0] is None


def test_a_second_derivative() -> None:
    q, k, v = random(1, 2, 2, 2), random(1, 4, 2, 2), random(1, 4, 2, 2)
    masking = Masking(key_padding_mask=torch.tensor([[False, False, True, False]]))
    assert torch.autograd.gradgradcheck(lambda *a: attention(*a, masking)[0], (q, k, v))


def test_a_mask_changed_in_place_before_backward_is_an_error() -> None:
    q = random(1, 3, 2, 8)
    mask = torch.zeros(3, 3, dtype=torch.float64)
    out, _ = attention(q, q, q, Masking(attn_mask=mask))
    mask[0, 1] = 1.0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_no_gradient_from_rows_without_any_key_by_the_formula() -> None:
    q, k, v = random(1, 3, 1, 8), random(1, 4, 1, 8), random(1, 4, 1, 8)
    mask = torch.tensor([[True] * 4, [False] * 4, [False] * 4])
    out, _ = formula.attention(q, k, v, Masking(attn_mask=mask))
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert all(g.isfinite().all() for g in gradients)
    assert (out[0, 0] == 0).all()
    assert (gradients[0][0, 0] == 0).all()
