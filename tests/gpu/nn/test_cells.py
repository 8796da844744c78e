"""The cells on a GPU: as accurate as torch's, one node a step, the same bits each time."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfai
from hfai.kernels.cell.autograd import EXTENSION
from hfai.nn import to_hfai
from tests.nn.operator_cases import assert_same_bits

CUDA = torch.device("cuda")
FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Below this no two orders of summation agree.
NOISE = {FP32: 3e-7, FP16: 3e-4, BF16: 2e-3}
KINDS = ["LSTMCell", "GRUCell", "RNNCell"]


def cells(kind: str, inputs: int, hidden: int, dtype: torch.dtype) -> tuple[nn.Module, ...]:
    """Return ours, torch's and torch's in float64, with the same parameters."""
    torchs: nn.Module = getattr(nn, kind)(inputs, hidden).to(CUDA, dtype)
    return to_hfai(copy.deepcopy(torchs)), torchs, copy.deepcopy(torchs).double()


def results(cell: nn.Module, x: Tensor, states: list[Tensor], steps: int = 3) -> list[Tensor]:
    """Return the states after a few steps, and the gradients of everything given."""
    dtype = next(cell.parameters()).dtype
    given = [t.detach().to(dtype).requires_grad_() for t in (x, *states)]
    hx: Any = tuple(given[1:])
    for _ in range(steps):
        made = cell(given[0], hx if len(hx) > 1 else hx[0])
        hx = made if isinstance(made, tuple) else (made,)
    dh = torch.arange(hx[0].numel(), device=CUDA, dtype=torch.float64).mul(1.7).sin()
    leaves = [*given, *cell.parameters()]
    found = torch.autograd.grad(hx, leaves, [dh.view_as(hx[0]).to(dtype)] * len(hx))
    return [*(y.detach() for y in hx), *found]


def operands(kind: str, batch: int, inputs: int, hidden: int) -> tuple[Tensor, list[Tensor]]:
    states = [torch.randn(batch, hidden, device=CUDA) for _ in range(1 + (kind == "LSTMCell"))]
    return torch.randn(batch, inputs, device=CUDA), states


def is_ours(cell: nn.Module, x: Tensor) -> bool:
    made = cell(x)
    node = (made[0] if isinstance(made, tuple) else made).grad_fn
    assert node is not None
    return "Step" in node.name()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("batch", [1, 64, 300])
def test_errors_are_at_most_one_and_a_half_times_torchs(
    kind: str, dtype: torch.dtype, batch: int
) -> None:
    ours, torchs, double = cells(kind, 70, 130, dtype)
    x, states = operands(kind, batch, 70, 130)
    x, states = x.to(dtype), [state.to(dtype) for state in states]
    assert is_ours(ours, x)
    triples = (results(cell, x, states) for cell in (ours, torchs, double))
    for one, other, expected in zip(*triples, strict=True):
        errors = [((t.double() - expected).norm() / expected.norm()).item() for t in (one, other)]
        assert errors[0] <= max(1.5 * errors[1], NOISE[dtype])


@pytest.mark.parametrize("kind", KINDS)
def test_the_node_in_cpp_takes_over_with_the_same_bits(kind: str) -> None:
    ours, _, _ = cells(kind, 32, 48, FP32)
    x, states = operands(kind, 65, 32, 48)
    before = results(ours, x, states)
    if EXTENSION.wait() is None:
        pytest.skip(f"needs node.cpp compiled: {EXTENSION.reason}")
    assert_same_bits(results(ours, x, states), before)
    assert_same_bits(results(ours, x, states), before)


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_graph_replays_forward_and_backward(kind: str) -> None:
    ours, _, _ = cells(kind, 64, 64, FP32)
    x, states = operands(kind, 8, 64, 64)
    expected = results(ours, x, states)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    static = torch.zeros_like(x)
    with torch.cuda.stream(stream):
        results(ours, static, states)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = results(ours, static, states)
    static.copy_(x)
    graph.replay()
    assert_same_bits(made, expected)


def test_autocast_and_what_torch_must_refuse_are_torchs() -> None:
    ours, torchs, _ = cells("LSTMCell", 32, 48, FP32)
    x = torch.randn(4, 32, device=CUDA)
    with torch.autocast("cuda", torch.bfloat16):
        assert_same_bits(ours(x), torchs(x))
    assert_same_bits(ours(x[0]), torchs(x[0]))
    with pytest.raises(RuntimeError):
        ours(torch.randn(4, 33, device=CUDA))


def test_explain_names_the_path() -> None:
    model = nn.ModuleList([nn.GRUCell(8, 8), nn.LSTMCell(8, 8).double()]).to(CUDA)
    first, second = hfai.explain(to_hfai(model))
    assert (first.path, second.path) == ("hfai", "torch")
    assert "float64" in second.reason
