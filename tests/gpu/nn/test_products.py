"""Products in fp32's accuracy on a Hopper GPU: as accurate as torch's, and the same bits."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from hfai.kernels import products
from hfai.kernels.products import linear, multiply, plan, why_not
from tests.nn.operator_cases import assert_same_bits

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0),
    reason="the kernels are for Hopper",
)

CUDA = torch.device("cuda")
LAST_PLACE = 2.0**-23  # fp32's


@pytest.fixture(autouse=True)
def _without_tf32() -> Iterator[None]:
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def error(found: Tensor, exact: Tensor) -> float:
    return float(((found.double() - exact).norm() / exact.norm()).detach())


def product(a: Tensor, b: Tensor) -> Tensor:
    out = torch.full((a.shape[0], b.shape[1]), math.nan, device=CUDA)
    multiply(a, b, out)
    return out


def drawn(kind: str, *shape: int) -> Tensor:
    if kind == "positive":
        return torch.rand(*shape, device=CUDA)
    values = torch.randn(*shape, device=CUDA)
    return values * torch.randn(*shape, device=CUDA).mul(3).exp() if kind == "wide" else values


@pytest.mark.parametrize("kind", ["normal", "positive", "wide"])
@pytest.mark.parametrize(
    ("m", "k", "n"),
    [
        (1024, 512, 1024),
        (4000, 985, 3940),
        (2048, 1024, 3072),
        (3940, 4000, 985),
        (1024, 51200, 1024),
        (257, 777, 65),
        (65, 5000, 64),
    ],
)
def test_errors_are_at_most_one_and_a_half_times_torchs(kind: str, m: int, k: int, n: int) -> None:
    torch.manual_seed(m + k + n)
    a, b = drawn(kind, m, k), drawn(kind, k, n)
    exact = a.double() @ b.double()
    # Where one product is nearly all of a sum, fp32 rounds it once, and here it is cut twice.
    assert error(product(a, b), exact) <= max(1.5 * error(a @ b, exact), 2 * LAST_PLACE)


@pytest.mark.parametrize("transposed", [False, True])
def test_any_strides_and_a_part_of_a_wider_result(transposed: bool) -> None:
    a = torch.randn(700, 1000, device=CUDA)[:, ::2]
    b = torch.randn(900, 500, device=CUDA).t() if transposed else torch.randn(500, 900, device=CUDA)
    room = torch.full((700, 1001), 7.0, device=CUDA)
    multiply(a, b, room[:, 50:950])
    assert error(room[:, 50:950], a.double() @ b.double()) < 3e-7
    assert (room[:, :50] == 7).all()
    assert (room[:, 950:] == 7).all()


def test_values_that_are_not_finite_reach_the_elements_that_they_reach_in_fp32() -> None:
    a, b = torch.randn(300, 400, device=CUDA), torch.randn(400, 500, device=CUDA)
    a[5, 7], a[100, 300], a[200, 0] = math.inf, -math.inf, math.nan
    b[9, 444], b[399, 3], b[7, 3], b[300, 4] = math.inf, -math.inf, 0.0, 0.0
    found, expected = product(a, b), a @ b
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.isinf(), expected.isinf())
    assert torch.equal(found[found.isinf()], expected[expected.isinf()])
    finite = expected.isfinite()
    torch.testing.assert_close(found[finite], expected[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("scale", [1e-18, 1e18])
def test_large_and_small_numbers_keep_their_accuracy(scale: float) -> None:
    a, b = (torch.randn(512, 512, device=CUDA) * scale for _ in range(2))
    exact = a.double() @ b.double()
    assert error(product(a, b), exact) <= 1.5 * error(a @ b, exact)


def test_bits_repeat_beside_other_work_and_in_a_captured_graph() -> None:
    a, b = torch.randn(3000, 2000, device=CUDA), torch.randn(2000, 1000, device=CUDA)
    first = product(a, b)
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    out = torch.empty_like(first)
    multiply(a, b, out)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        multiply(a, b, out)
    for _ in range(20):
        out.fill_(math.nan)
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            torch.randn(2000, 2000, device=CUDA) @ torch.randn(2000, 2000, device=CUDA)
        with torch.cuda.stream(side):
            again = product(a, b)
        graph.replay()
        torch.cuda.synchronize()
        assert_same_bits([out, again], [first, first])


def test_linear_is_as_accurate_as_torchs_and_differentiates_twice() -> None:
    shapes = ((2048, 3, 1024), (1536, 1024), (1536,))
    given = [torch.randn(*shape, device=CUDA, requires_grad=True) for shape in shapes]
    doubles = [tensor.detach().double().requires_grad_() for tensor in given]
    dy = torch.randn(2048, 3, 1536, device=CUDA)
    results = []
    for way, inputs in ((linear, given), (F.linear, given), (F.linear, doubles)):
        y = way(*inputs)
        gradients = torch.autograd.grad(y, inputs, dy.to(y.dtype), create_graph=True)
        (twice,) = torch.autograd.grad(gradients[1].square().sum(), inputs[0])
        results.append([y, *gradients, twice])
    assert type(results[0][0].grad_fn).__name__ == "LinearBackward"
    for ours, torchs, exact in zip(*results, strict=True):
        assert error(ours, exact.detach()) <= max(1.5 * error(torchs, exact.detach()), 1e-7)


def test_calls_that_others_watch_or_that_are_small_are_torchs() -> None:
    x, weight = torch.randn(4096, 1024, device=CUDA), torch.randn(1024, 1024, device=CUDA)
    out = torch.empty(4096, 1024, device=CUDA)
    assert why_not(x, weight, out) is None
    assert "too small" in str(why_not(x[:64], weight, out[:64]))
    assert "not fp32" in str(why_not(x.half(), weight, out))
    weight.requires_grad_()
    assert type(linear(x, weight, None).grad_fn).__name__ == "LinearBackward"
    torch.backends.cuda.matmul.allow_tf32 = True
    assert type(linear(x, weight, None).grad_fn).__name__ != "LinearBackward"
    torch.backends.cuda.matmul.allow_tf32 = False
    with torch.autocast("cuda", torch.bfloat16):
        assert linear(x, weight, None).dtype is torch.bfloat16
    mapped = torch.func.vmap(lambda row: linear(row, weight, None))(x.view(4, 1024, 1024))
    torch.testing.assert_close(mapped.flatten(0, 1), x @ weight.t(), rtol=1e-4, atol=1e-3)


def test_memory_beside_the_result_stays_within_the_workspace() -> None:
    m, k, n = 40000, 1024, 3072
    a, b = torch.randn(m, k, device=CUDA), torch.randn(k, n, device=CUDA)
    out = torch.empty(m, n, device=CUDA)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    products.multiply(a, b, out)
    assert torch.cuda.max_memory_allocated() - before <= plan.workspace(m, k, n) + 2**20
