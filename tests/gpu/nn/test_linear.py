"""The attention module's linear maps in TF32 on a GPU: gradients as accurate as torch's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels.mha import linear as linears
from hfai.kernels.mha.linear import linear, multiply_halves, why_torchs
from tests.kernels.attention.cases import error


@pytest.fixture(autouse=True)
def _tf32(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    monkeypatch.setattr(linears, "LEAST_WORK", 1)
    monkeypatch.setattr(linears, "halves_pay", lambda m, n, k: True)
    yield
    torch.backends.cuda.matmul.allow_tf32 = allowed


def operands(kind: str, m: int, n: int, k: int) -> tuple[Tensor, ...]:
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    x, weight, bias, dy = normal(m, k), normal(n, k), normal(n), normal(m, n)
    if kind == "rows":
        x *= torch.exp2(-15 * torch.rand(m, 1, generator=generator, device="cuda"))
        dy *= torch.exp2(-15 * torch.rand(m, 1, generator=generator, device="cuda"))
    elif kind == "columns":
        x *= torch.exp2(-15 * torch.rand(k, generator=generator, device="cuda"))
        dy *= torch.exp2(-15 * torch.rand(n, generator=generator, device="cuda"))
    elif kind == "tiny":
        dy *= 1e-20
    return x, weight, bias, dy


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="measured on Hopper",
)
@pytest.mark.parametrize("kind", ["normal", "rows", "columns", "tiny"])
def test_gradients_are_as_accurate_as_torchs(kind: str) -> None:
    x, weight, bias, dy = operands(kind, 4000, 384, 256)
    inputs = [t.requires_grad_() for t in (x.view(10, 400, 256), weight, bias)]
    assert why_torchs(*inputs) is None
    dy = dy.view(10, 400, 384)
    y, theirs = linear(*inputs), F.linear(*inputs)
    assert torch.equal(y, theirs)
    ours, torchs = (torch.autograd.grad(made, inputs, dy) for made in (y, theirs))
    doubles = [t.detach().double().requires_grad_() for t in inputs]
    exact = torch.autograd.grad(F.linear(*doubles), doubles, dy.double())
    for one, other, expected in zip(ours, torchs, exact, strict=True):
        assert error(one, expected, 0.0) <= 1.5 * error(other, expected, 0.0)
    again = torch.autograd.grad(linear(*inputs), inputs, dy)
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))


def test_infinity_and_nan_reach_the_elements_that_they_reach_in_fp32() -> None:
    x, _, _, dy = operands("normal", 4000, 384, 256)
    x[5, 7], dy[9, 11], dy[13, 17] = torch.inf, torch.nan, -torch.inf
    found, expected = multiply_halves(dy, x), dy.double().t() @ x.double()
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())


def test_operands_of_any_layout_are_taken() -> None:
    x, _, _, dy = operands("normal", 4000, 384, 256)
    expected = multiply_halves(dy, x)
    shifted = dy.new_empty(dy.numel() + 1)[1:].view_as(dy).copy_(dy)
    for other in (shifted, dy.t().contiguous().t(), torch._neg_view(-dy)):
        assert torch.equal(multiply_halves(other, x), expected)
