"""The products' kernels on the CPU, thread by thread, against float64 and fp32's own rules."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels import jit
from hfai.kernels.products import autograd, call, linear, plan
from hfai.kernels.products.plan import Plan
from hfai.kernels.products.programs import Programs
from hfai.kernels.rnn import products as recurrent
from tests.kernels.compiled import DEVICES
from tests.kernels.products.emulated import emulated_programs, load
from tests.kernels.rnn.emulated import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++ to compile the kernels with")

LARGEST = torch.finfo(torch.float32).max


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Programs]:
    """Let `multiply` take CPU tensors and run the emulated kernels."""
    kernels = emulated_programs()
    monkeypatch.setattr(call, "programs", lambda device: kernels)
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_90"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return kernels


def taken_apart(kernels: Programs, matrix: Tensor) -> tuple[Tensor, list[bool]]:
    """Return the planes [3, rows, depth] of a matrix in float64, and which pieces are finite."""
    raw = torch.empty(plan.piece_bytes(*matrix.shape, plan.ROWS), dtype=torch.uint8)
    call._Launches(0, 132).split(matrix, raw, None, raw)
    row_tiles, depth_tiles = (
        plan.tiles(s, u) for s, u in zip(matrix.shape, (128, 32), strict=True)
    )
    pieces = raw.view(row_tiles * depth_tiles, plan.PIECE_PITCH)
    finite = pieces[:, 3 * 8192 : 3 * 8192 + 4].contiguous().view(torch.int32).flatten()
    planes = pieces[:, : 3 * 8192].contiguous().view(torch.bfloat16)
    planes = planes.view(row_tiles, depth_tiles, 3, 128, 4, 8)
    # The swizzle: part p of row r lies at p ^ (r / 2 % 4).
    where = torch.arange(4) ^ (torch.arange(128) // 2 % 4)[:, None]
    planes = planes.gather(4, where[..., None].expand(planes.shape))
    planes = planes.permute(2, 0, 3, 1, 4, 5).reshape(3, row_tiles * 128, depth_tiles * 32)
    assert not planes[:, matrix.shape[0] :].any()
    assert not planes[:, :, matrix.shape[1] :].any()
    planes = planes[:, : matrix.shape[0], : matrix.shape[1]]
    return planes.double(), [bool(value) for value in finite]


def relative_error(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).norm() / exact.norm()).detach())


@pytest.mark.parametrize("transposed", [False, True])
def test_three_parts_are_the_number(kernels: Programs, transposed: bool) -> None:
    matrix = torch.randn(37, 130).T if transposed else torch.randn(130, 37)
    matrix = matrix * 10.0 ** torch.randint(-30, 30, matrix.shape)
    planes, finite = taken_apart(kernels, matrix)
    assert torch.equal(planes.sum(0), matrix.double())
    assert all(finite)
    assert (planes[1].abs() <= planes[0].abs() * 2**-8).all()


def test_the_largest_numbers_do_not_become_infinite(kernels: Programs) -> None:
    matrix = torch.tensor([[LARGEST, -LARGEST, 3.395e38, 2.0**127]])
    planes, finite = taken_apart(kernels, matrix)
    assert torch.equal(planes.sum(0), matrix.double())
    assert all(finite)


def test_tiny_numbers_keep_what_bf16_can_hold(kernels: Programs) -> None:
    matrix = torch.tensor([[1e-30, -3e-38, 1e-40, 1e-45, 0.0, -0.0]])
    planes, _ = taken_apart(kernels, matrix)
    assert ((planes.sum(0) - matrix.double()).abs() <= 2.0**-134).all()


def test_what_is_not_finite_is_in_the_high_part_alone_and_its_piece_says_so(
    kernels: Programs,
) -> None:
    matrix = torch.ones(130, 40)
    matrix[129, 5], matrix[0, 39], matrix[1, 39] = math.inf, math.nan, -math.inf
    planes, finite = taken_apart(kernels, matrix)
    assert finite == [True, False, False, True]
    assert torch.equal(planes[0].nan_to_num(7), matrix.double().nan_to_num(7))
    assert not planes[1:].any()


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 1, 1), (128, 32, 256), (129, 33, 257), (5, 200, 3), (300, 64, 20)]
)
@pytest.mark.parametrize("transposed", [False, True])
def test_products_of_any_size_and_stride_are_as_accurate_as_fp32(
    kernels: Programs, m: int, k: int, n: int, transposed: bool
) -> None:
    a, b = torch.randn(m, 2 * k)[:, ::2], torch.randn(k, n + 1)[:, :n]
    if transposed:
        a, b = torch.randn(k, m).T, torch.randn(n, k).T
    room = torch.full((m, n + 3), 7.0)
    call.multiply(a, b, room[:, :n])
    assert relative_error(room[:, :n], a.double() @ b.double()) < 2e-7
    assert (room[:, n:] == 7).all()


@pytest.mark.parametrize(
    "cut", [Plan(300, 150, 3, 0.0), Plan(128, 64, 1, 0.0), Plan(128, 64, 2, 0.0)]
)
def test_ranges_of_rows_and_of_the_summed_dimension_add_up(
    kernels: Programs, monkeypatch: pytest.MonkeyPatch, cut: Plan
) -> None:
    monkeypatch.setattr(plan, "choose", lambda *sizes: cut)
    a, b, bias = torch.randn(300, 150), torch.randn(150, 270), torch.randn(270)
    out = torch.full((300, 270), math.nan)
    call.multiply(a, b, out, bias)
    assert relative_error(out, a.double() @ b.double() + bias.double()) < 2e-7
    again = torch.empty_like(out)
    call.multiply(a, b, again, bias)
    assert torch.equal(out, again)


def test_values_that_are_not_finite_reach_the_elements_that_they_reach_in_fp32(
    kernels: Programs,
) -> None:
    a, b = torch.randn(130, 70), torch.randn(70, 257)
    a[3, 5], a[70, 40], a[129, 69] = math.inf, math.nan, -math.inf
    b[5, 9] = b[40, 8] = 0.0  # infinity times zero, NaN times zero
    b[2, 200], b[60, 256] = -math.inf, math.nan
    out = torch.empty(130, 257)
    call.multiply(a, b, out)
    expected = a @ b
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.isinf(), expected.isinf())
    there = expected.isinf()
    assert torch.equal(out[there], expected[there])
    finite = expected.isfinite()
    exact = a.double().nan_to_num(0, 0, 0) @ b.double().nan_to_num(0, 0, 0)
    assert relative_error(out[finite], exact[finite]) < 2e-7


@pytest.fixture
def every_size_is_ours(kernels: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `linear` and its node take the kernels' way on the CPU."""
    monkeypatch.setattr(autograd, "why_not_linear", lambda *tensors: None)
    monkeypatch.setattr(autograd, "why_not", lambda *tensors: None)


@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_has_torchs_results_and_gradients(every_size_is_ours: None, has_bias: bool) -> None:
    given = [torch.randn(*s, requires_grad=True) for s in ((2, 70, 36), (40, 36), (40,))]
    given = given if has_bias else given[:2]
    doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    dy = torch.randn(2, 70, 40)
    y, exact = linear(*given, *[None] * (not has_bias)), F.linear(*doubles)
    assert type(y.grad_fn).__name__ == "LinearBackward"
    found = [y, *torch.autograd.grad(y, given, dy)]
    expected = [exact, *torch.autograd.grad(exact, doubles, dy.double())]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert relative_error(ours, theirs) < 3e-7


def test_linear_can_be_differentiated_twice(every_size_is_ours: None) -> None:
    given = [torch.randn(*s, requires_grad=True) for s in ((3, 4), (5, 4), (5,))]
    results = []
    for way in (linear, F.linear):
        (dx,) = torch.autograd.grad(way(*given).square().sum(), given[0], create_graph=True)
        results.append(torch.autograd.grad(dx.square().sum(), given))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_linear_of_expanded_gradients_and_frozen_operands(every_size_is_ours: None) -> None:
    x, weight = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4)
    linear(x, weight, None).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad, weight.sum(0).expand(6, 4))
    frozen = linear(x, weight, None).grad_fn
    assert frozen is not None
    assert frozen.saved_tensors[0] is None  # type: ignore[attr-defined]


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (513, 45), (300, 64)])
def test_column_sums_are_the_sums_of_the_rows(
    monkeypatch: pytest.MonkeyPatch, rows: int, columns: int
) -> None:
    program = (["rnn/column_sums.cu"], {"SUM_THREADS": 256})
    kernel = load(program, "hfai_rnn_column_sums", 256, 8 * 33 * 4)
    monkeypatch.setattr(recurrent, "_sum_kernel", lambda device: kernel)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    matrix = torch.randn(rows, columns + 3)[:, :columns]
    parts = plan.tiles(rows, recurrent.SUMMED_AT_ONCE)
    sums = recurrent._column_sums(matrix, torch.empty(parts, columns), recurrent.SUMMED_AT_ONCE)
    sums = recurrent._column_sums(sums, torch.empty(1, columns), parts)
    torch.testing.assert_close(sums[0].double(), matrix.double().sum(0), rtol=1e-6, atol=1e-5)
