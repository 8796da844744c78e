"""The kernels' own sources, run on the CPU, against torch's operators in float64."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels.residual_norm import call, formula, launch, normalise_sum
from hfai.kernels.residual_norm.programs import Types
from tests.kernels.residual_norm.emulated import HostConfiguration
from tests.kernels.rnn.emulated import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="compiles the kernels for the CPU")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
MIXED = "mixed"  # half-precision branches and fp32 residuals, as under autocast
TOLERANCE = {FP32: 2e-5, BF16: 2e-2, FP16: 3e-3, MIXED: 2e-2}


@pytest.fixture(autouse=True)
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(call, "make_configuration", HostConfiguration)
    monkeypatch.setattr(call, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(call, "_configurations", {})


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def parts(rows: int, length: int, dtype: Any) -> list[Tensor]:
    """Return branch, branch_bias, residual, weight and bias."""
    branch, rest = (BF16, FP32) if dtype is MIXED else (dtype, dtype)
    shapes = ((rows, length), (length,), (rows, length), (length,), (length,))
    types = (branch, rest, rest, rest, rest)
    return [drawn(*shape, dtype=t) for shape, t in zip(shapes, types, strict=True)]


def expected(given: list[Tensor], keep: Tensor | None, scale: float) -> tuple[Tensor, ...]:
    """Return z, y and the leaves that they come from, in float64."""
    leaves = [t.detach().double().requires_grad_() for t in given]
    branch = leaves[0] + leaves[1]
    if keep is not None:
        branch = torch.where(keep, branch * scale, 0.0)
    z = leaves[2] + branch
    return z, F.layer_norm(z, z.shape[-1:], leaves[3], leaves[4], 1e-5), *leaves


@pytest.mark.parametrize(
    ("length", "dtype"), [(8, FP32), (264, MIXED), (520, FP16), (1032, FP32)], ids=str
)
def test_values_and_gradients(dtype: Any, length: int) -> None:
    torch.manual_seed(1)
    rows = 21
    given = parts(rows, length, dtype)
    with torch.autocast("cpu", BF16, enabled=dtype is MIXED):
        z, y, half = normalise_sum(*given, 1e-5, 0.0, z=True, half=True)
    assert z is not None
    assert y is not None
    assert half is not None
    if dtype is MIXED:
        assert (z.dtype, y.dtype, half.dtype) == (FP32, FP32, BF16)
    exact_z, exact_y, *leaves = expected(given, None, 1.0)
    coming = [torch.randn_like(t) for t in (z, y, half)]
    torch.autograd.backward([z, y, half], coming)
    torch.autograd.backward(
        [exact_z, exact_y], [coming[0].double(), coming[1].double() + coming[2].double()]
    )
    made = [z, y, half, *(t.grad for t in given)]
    right = [exact_z, exact_y, exact_y, *(t.grad for t in leaves)]
    for index, (one, other) in enumerate(zip(made, right, strict=True)):
        assert one is not None
        error = (one.double() - other).norm() / other.norm()
        assert error < TOLERANCE[dtype], (index, error)


@pytest.mark.parametrize(("y", "half", "z"), list(itertools.product([False, True], repeat=3)))
def test_gradients_of_any_of_the_outputs_alone(y: bool, half: bool, z: bool) -> None:
    if not (y or half or z):
        return
    given = parts(5, 72, FP32)
    outputs = [o for o in normalise_sum(*given, 1e-5, 0.0, z=z, y=y, half=half) if o is not None]
    assert len(outputs) == y + half + z
    coming = [torch.randn_like(o) for o in outputs]
    torch.autograd.backward(outputs, coming)
    exact_z, exact_y, *leaves = expected(given, None, 1.0)
    exact = [o for o, wanted in ((exact_z, z), (exact_y, y), (exact_y, half)) if wanted]
    torch.autograd.backward(exact, [c.double() for c in coming])
    for one, other in zip(given, leaves, strict=True):
        if y or half or one.grad is not None:
            assert one.grad is not None
            right = torch.zeros_like(other) if other.grad is None else other.grad
            torch.testing.assert_close(one.grad.double(), right, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("length", "dtype"), [(72, FP32), (1032, BF16)], ids=str)
def test_dropout_drops_what_its_mask_says_and_as_much_as_asked(
    dtype: torch.dtype, length: int
) -> None:
    torch.manual_seed(2)
    rows, p = 40, 0.3
    types = Types(dtype, dtype, dtype, dtype)
    configuration = HostConfiguration(-1, length, types, True, True, True, True)
    given = [t.detach() for t in parts(rows, length, dtype)]
    made = launch.forward(
        configuration, *given, 1e-5, p, z=True, y=True, half=False, for_backward=True
    )
    assert made.mask is not None
    assert made.z is not None
    keep = formula.kept(made.mask, made.z.shape)
    assert keep.double().mean().item() == pytest.approx(0.7, abs=4 * (0.21 / keep.numel()) ** 0.5)
    # No column and no row is favoured, and neighbours do not follow each other.
    assert keep.double().mean(0).sub(0.7).abs().max() < 0.45
    assert (keep[:, 1:] == keep[:, :-1]).double().mean().item() == pytest.approx(0.58, abs=0.05)
    z = expected(given, keep, 1 / 0.7)[0]
    torch.testing.assert_close(made.z.double(), z, rtol=2e-2, atol=2e-2)


def test_dropout_in_backward_is_that_of_forward() -> None:
    given = parts(9, 72, FP32)
    torch.manual_seed(3)
    z, y, _ = normalise_sum(*given, 1e-5, 0.25, z=True)
    assert z is not None
    assert y is not None
    # What was dropped shows nothing but the residual.
    keep = z.detach() != given[2].detach()
    assert 0.6 < keep.double().mean() < 0.9
    dy = torch.randn_like(y)
    y.backward(dy)
    _, exact, *leaves = expected(given, keep, 1 / 0.75)
    exact.backward(dy.double())
    for one, other in zip(given, leaves, strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_a_seed_repeats_the_mask_and_another_call_draws_another() -> None:
    given = [t.detach() for t in parts(9, 72, FP32)]

    def call_once() -> Tensor:
        y = normalise_sum(*given, 1e-5, 0.5).y
        assert y is not None
        return y

    torch.manual_seed(4)
    first, second = call_once(), call_once()
    torch.manual_seed(4)
    assert torch.equal(first, call_once())
    assert not torch.equal(first, second)


def test_a_constant_row_comes_out_as_the_bias_and_nan_stays_in_its_row() -> None:
    given = [t.detach() for t in parts(6, 72, FP32)]
    given[0].zero_(), given[1].zero_()
    given[2].fill_(12345.678)
    given[2][3, 7] = float("nan")
    y = normalise_sum(*given, 1e-5, 0.0).y
    assert y is not None
    assert y[3].isnan().all()
    others = [0, 1, 2, 4, 5]
    torch.testing.assert_close(y[others], given[4].expand(5, 72), rtol=0, atol=1e-5)


@pytest.mark.parametrize("missing", [(1,), (1, 3, 4)])
def test_parameters_may_be_missing(missing: tuple[int, ...]) -> None:
    given: list[Any] = parts(5, 72, FP32)
    for index in missing:
        given[index] = None
    y = normalise_sum(*given, 1e-5, 0.0).y
    assert y is not None
    branch, branch_bias, residual, weight, bias = given
    z = residual + branch + (0 if branch_bias is None else branch_bias)
    exact = F.layer_norm(z, (72,), weight, bias)
    torch.testing.assert_close(y, exact)
    wanted = [t for t in given if t is not None]
    dy = torch.randn_like(y)
    made = torch.autograd.grad(y, wanted, dy)
    torch.testing.assert_close(made, torch.autograd.grad(exact, wanted, dy), rtol=1e-4, atol=1e-5)


def test_only_gradients_that_are_needed_are_made() -> None:
    given = [t.detach() for t in parts(5, 72, FP32)]
    given[0].requires_grad_()
    y = normalise_sum(*given, 1e-5, 0.0).y
    assert y is not None
    y.sum().backward()
    assert [t.grad is not None for t in given] == [True, False, False, False, False]


def test_gradients_of_gradients() -> None:
    given = [t.detach() for t in parts(3, 8, FP32)]
    leaves = [t.requires_grad_() for t in given]

    def second(function: Any) -> list[Tensor]:
        y = function(*leaves)
        first = torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True)
        return list(torch.autograd.grad(sum(g.pow(2).sum() for g in first), leaves))

    ours = second(lambda *given: normalise_sum(*given, 1e-5, 0.0).y)
    torchs = second(
        lambda branch, shift, residual, weight, bias: F.layer_norm(
            residual + branch + shift, (8,), weight, bias
        )
    )
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def test_gradients_that_keep_their_graph_are_right_where_one_norm_is_applied_twice() -> None:
    branch, shift, residual, weight, bias = leaves = parts(3, 72, FP32)

    def gradients(norm: Any) -> list[Tensor]:
        y = norm(branch, shift, norm(branch, shift, residual, weight, bias), weight, bias)
        return list(torch.autograd.grad(y.pow(3).sum(), leaves, create_graph=True))

    ours = gradients(lambda *given: normalise_sum(*given, 1e-5, 0.0).y)
    torchs = gradients(
        lambda branch, shift, residual, weight, bias: F.layer_norm(
            residual + branch + shift, (72,), weight, bias
        )
    )
    for one, other in zip(ours, torchs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * other.abs().max().item())


def test_gradients_that_lie_otherwise_are_read_right() -> None:
    given = parts(6, 72, FP32)
    y = normalise_sum(*given, 1e-5, 0.0).y
    assert y is not None
    dy = torch.randn(72, 6).t()
    made = torch.autograd.grad(y, given, dy, retain_graph=True)
    again = torch.autograd.grad(y, given, dy.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(made, again, strict=True))


def test_what_is_not_covered_is_named() -> None:
    def reason(given: list[Tensor], p: float = 0.0) -> str:
        return call.why_not_covered(*given, p) or ""

    assert not reason(parts(4, 72, FP32))
    assert "rows of 70" in reason(parts(4, 70, FP32))
    assert "dropout of 1.0" in reason(parts(4, 72, FP32), 1.0)
    assert "float64" in reason(parts(4, 72, torch.float64))
    assert "not contiguous" in reason([parts(72, 72, FP32)[0].t(), *parts(72, 72, FP32)[1:]])
    assert "parameters of" in reason(
        [
            *parts(4, 72, BF16)[:1],
            *parts(4, 72, FP32)[1:2],
            *parts(4, 72, BF16)[2:3],
            *parts(4, 72, FP32)[3:],
        ]
    )
    assert normalise_sum(*parts(4, 70, FP32), 1e-5, 0.0) is None
    assert normalise_sum(*parts(4, 72, FP32), 1e-5, 1.0) is None
    given = parts(4, 72, FP32)
    assert normalise_sum(*given, 1e-5, 0.0) is not None
    given[2] = drawn(72, 4, dtype=FP32).t()  # of the same types as the call before, and not dense
    assert normalise_sum(*given, 1e-5, 0.0) is None
