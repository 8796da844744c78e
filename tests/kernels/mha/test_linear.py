"""The module's linear maps: derivatives of all orders, and fp32 matrices as scaled fp16."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from hfai.kernels import jit
from hfai.kernels.mha import linear as linears
from hfai.kernels.mha.linear import apply_linear, halves_pay, linear, to_halves, why_torchs
from tests.kernels.attention import emulated
from tests.kernels.compiled import DEVICES


def test_derivatives_of_all_orders_are_those_of_the_map() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (
        torch.randn(*shape, generator=generator, dtype=torch.float64, requires_grad=True)
        for shape in ((2, 3, 4), (5, 4), (5,))
    )
    assert torch.autograd.gradcheck(apply_linear, (x, weight, bias))
    assert torch.autograd.gradgradcheck(apply_linear, (x, weight, bias))
    assert torch.equal(apply_linear(x, weight, None), F.linear(x, weight))


def test_only_the_gradients_asked_for_are_made() -> None:
    x, weight = torch.randn(6, 4), torch.randn(5, 4, requires_grad=True)
    y = apply_linear(x, weight, None)
    (found,) = torch.autograd.grad(y, weight, torch.ones_like(y))
    torch.testing.assert_close(found, torch.ones(5, 6) @ x)
    assert not apply_linear(x, weight.detach(), None).requires_grad


def test_elsewhere_it_is_torchs() -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4)
    assert why_torchs(x, weight, None) is not None
    y = linear(x, weight, None)
    assert y.grad_fn is not None
    assert "Linear" not in type(y.grad_fn).__name__
    assert torch.equal(y, F.linear(x, weight))


def test_halves_pay_where_a_product_is_many_times_its_operands() -> None:
    assert halves_pay(51200, 3072, 1024)
    assert not halves_pay(51200, 1024, 1024)
    assert not halves_pay(320000, 1536, 512)
    assert not halves_pay(51200, 3073, 1024)


def test_sums_in_fp16_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.backends.cuda, "matmul", SimpleNamespace(allow_fp16_accumulation=True)
    )
    assert not halves_pay(51200, 3072, 1024)


@pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++ for the emulation")
def test_halves_keep_tf32s_bits_and_what_is_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(name: str, device: int) -> emulated.EmulatedKernel:
        constants, types = {"THREADS": linears.THREADS}, {"T": torch.float16}
        return emulated.load(["mha/halves.cu"], constants, types, name, linears.THREADS, 0)

    monkeypatch.setattr(linears, "kernel", kernel)
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_90"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(40, 64, generator=generator) * 1e-20
    a[3] *= 2.0**-20  # still within fp16's range
    a[5, 6], a[7, 8], a[9, 10] = torch.inf, -torch.inf, torch.nan
    b = torch.randn(40, 24, generator=generator) * 1e20
    *halves, back = to_halves(a, b)
    for given, half, scale in zip((a, b), halves, back, strict=True):
        returned = half.double() * scale.double()
        finite = given.isfinite()
        assert torch.equal(returned[~finite].nan_to_num(), given[~finite].double().nan_to_num())
        large = finite & (given.abs() > given[finite].abs().max() * 2.0**-28)
        assert large.sum() > 0.9 * given.numel()
        error = (returned - given.double()).abs() / given.double().abs()
        assert error[large].max() <= 2.0**-11
    assert (to_halves(torch.zeros(8, 8), b)[0] == 0).all()
