"""The node around a core: gradients lie as the products do, wherever the core left them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from hfai.kernels.attention import Masking, formula
from hfai.kernels.mha import cores, weights
from hfai.kernels.mha.autograd import apply_attend
from hfai.kernels.mha.cores import Core, Gradients, Kept, OnCpu, ThenOurs
from hfai.kernels.mha.projections import Layout

B, L, S, H, D = 2, 6, 5, 3, 8


def backward_by_row_sums(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    masking: Masking,
    gradients: Gradients,
) -> Gradients:
    """What our kernel computes, with its arguments, in plain operators: it needs a GPU to run."""
    q, k, v, out, dout = (t.transpose(1, 2) for t in (q, k, v, out, dout))
    scores = q @ k.transpose(-2, -1) * D**-0.5
    if masking.causal:
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf)
    p = torch.exp(scores - lse[..., None])
    ds = p * (dout @ v.transpose(-2, -1) - (dout * out).sum(-1, keepdim=True)) * D**-0.5
    made = (ds @ k, ds.transpose(-2, -1) @ q, p.transpose(-2, -1) @ dout)
    for target, gradient in zip(gradients, made, strict=True):
        target.copy_(gradient.transpose(1, 2))
    return gradients


class Packed(OnCpu):
    """A core whose gradients lie in one tensor, as the memory-efficient kernel leaves them."""

    def backward(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        bias: Tensor | None,
        out: Tensor,
        kept: Kept,
        causal: bool,
    ) -> Gradients:
        made = super().backward(grad, q, k, v, bias, out, kept, causal)
        if q.shape != k.shape:
            return made
        whole = torch.stack([g.contiguous() for g in made], dim=2)  # [B, L, 3, H, D]
        dq, dk, dv = whole.unbind(2)
        return dq, dk, dv


@pytest.fixture(params=[OnCpu, Packed, lambda: ThenOurs(OnCpu())], ids=["apart", "packed", "ours"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(cores, "attention_backward", backward_by_row_sums)
    build: Callable[[], Core] = request.param
    return build()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("products", [1, 2, 3])
def test_gradients_of_one_two_or_three_products_are_those_of_the_formula(
    core: Core, products: int, batch_first: bool, causal: bool
) -> None:
    layout = Layout(H, batch_first)
    widths = {1: [3], 2: [1, 2], 3: [1, 1, 1]}[products]
    given = []
    for i, held in enumerate(widths):
        length = S if i else L
        shape = (B, length) if batch_first else (length, B)
        given.append(torch.randn(*shape, held * H * D).requires_grad_())
    (rows,) = apply_attend(core, layout, None, causal, False, *given)
    q, k, v = layout.split(given)
    out, _ = formula.attention(q, k, v, Masking(causal))
    expected = layout.join(out)
    torch.testing.assert_close(rows, expected, rtol=1e-4, atol=1e-5)
    grad = torch.randn_like(rows)
    found = torch.autograd.grad(rows, given, grad)
    for one, other in zip(found, torch.autograd.grad(expected, given, grad), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        assert one.is_contiguous()


def test_packed_gradients_are_handed_on_without_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Watched(Packed):
        def backward(self, *given: object) -> Gradients:  # type: ignore[override]
            made = super().backward(*given)  # type: ignore[arg-type]
            seen.append(made[0].untyped_storage().data_ptr())
            return made

    product = torch.randn(B, L, 3 * H * D).requires_grad_()
    (rows,) = apply_attend(Watched(), Layout(H, True), None, False, False, product)
    (gradient,) = torch.autograd.grad(rows.sum(), product)
    assert gradient.untyped_storage().data_ptr() == seen[0]


@pytest.mark.parametrize("chunk", [1, 1 << 25])
def test_weights_are_the_formulas_whatever_the_size_of_a_part(
    monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr(weights, "CHUNK_BYTES", chunk)
    q, k = torch.randn(B, L, H, D), torch.randn(B, S, H, D)
    for causal in (False, True):
        for bias in (None, torch.randn(1, 1, L, S), torch.randn(B, H, L, S)):
            made = weights.averaged(q, k, (), bias, causal)
            _, of_heads = formula.attention(q, k, k, Masking(causal, bias))
            torch.testing.assert_close(made, of_heads.mean(1), rtol=1e-4, atol=1e-5)
