"""Stacks of layers that run as a wavefront: accurate, the same bits each time, any way called."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfai.kernels.rnn import stretches
from tests.gpu.nn.test_rnn import (
    BF16,
    CUDA,
    FP16,
    FP32,
    NOISE,
    _nothing_gives_up,
    error,
    layers,
    results,
)
from tests.nn.operator_cases import assert_same_bits

__all__ = ["_nothing_gives_up"]


@pytest.fixture(autouse=True)
def _wavefront(monkeypatch: pytest.MonkeyPatch) -> None:
    """Short sequences run as a wavefront too, if the layers' shape allows it."""
    monkeypatch.setattr(stretches, "STRETCH_ON_HOST", 0.0)


def is_wavefront(layer: nn.Module, x: Tensor) -> bool:
    return type(layer(x)[0].grad_fn).__name__ == "LayersBackward"


@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
@pytest.mark.parametrize(
    ("kind", "hidden", "batch", "steps", "options"),
    [
        ("LSTM", 256, 4, 400, {"num_layers": 4}),
        ("LSTM", 203, 3, 101, {"num_layers": 2, "bias": False}),
        ("LSTM", 512, 8, 200, {"num_layers": 3}),
        ("GRU", 256, 16, 130, {"num_layers": 3}),
        ("GRU", 333, 1, 257, {"num_layers": 2}),
        ("RNN", 400, 4, 120, {"num_layers": 2}),
    ],
)
def test_a_wavefront_is_as_accurate_as_torch_and_repeats_its_bits(
    kind: str,
    hidden: int,
    batch: int,
    steps: int,
    options: dict[str, Any],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, torchs, double = layers(kind, hidden, dtype, **options)
    x = torch.randn(steps, batch, hidden, device=CUDA, dtype=torch.float64).to(dtype)
    assert is_wavefront(ours, x)
    found = results(ours, x)
    for _ in range(3):
        assert_same_bits(found, results(ours, x))
    one_layer_at_a_time(monkeypatch)
    others = [results(layer, x) for layer in (ours, torchs, double)]
    for mine, layered, its, exact in zip(found, *others, strict=True):
        # The same products in TF32 either way; states between stretches are rounded to the type.
        allowed = max(1.5 * error(its, exact), 1.1 * error(layered, exact))
        assert error(mine, exact) <= allowed + NOISE[dtype]


def one_layer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stretches, "stretch_count", lambda *_: 1)


def everything(layer: nn.Module, x: Tensor, states: tuple[Tensor, ...]) -> list[Tensor]:
    """Return y, the last states, and the gradients of x, the first states and all parameters."""
    leaves = [x.clone().requires_grad_(), *(state.clone().requires_grad_() for state in states)]
    hx = leaves[1] if len(states) == 1 else tuple(leaves[1:])
    y, last = layer(leaves[0], hx)
    last = (last,) if isinstance(last, Tensor) else last
    outputs = [y, *last]
    generator = torch.Generator(CUDA).manual_seed(3)
    grads = [torch.randn(o.shape, generator=generator, device=CUDA, dtype=o.dtype) for o in outputs]
    return [
        *(output.detach() for output in outputs),
        *torch.autograd.grad(outputs, [*leaves, *layer.parameters()], grads),
    ]


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_states_in_and_out_have_their_gradients(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = layers(kind, 256, FP32, num_layers=3)
    x = torch.randn(150, 5, 256, device=CUDA)
    states = tuple(torch.randn(3, 5, 256, device=CUDA) for _ in range(2 if kind == "LSTM" else 1))
    found = everything(ours, x, states)
    with torch.no_grad():
        assert_same_bits([found[0]], [ours(x, states if kind == "LSTM" else states[0])[0]])
    one_layer_at_a_time(monkeypatch)
    for mine, other in zip(found, everything(ours, x, states), strict=True):
        assert error(mine, other.double()) < 1e-3  # TF32, in other sums


def test_a_gradient_of_the_last_states_alone_flows_back() -> None:
    ours, torchs, _ = layers("LSTM", 256, FP32, num_layers=2)
    x = torch.randn(120, 2, 256, device=CUDA)
    found = []
    for layer in (ours, torchs):
        given = x.clone().requires_grad_()
        found.append(torch.autograd.grad(layer(given)[1][1].sum(), given)[0])
    torch.testing.assert_close(*found, rtol=2e-3, atol=2e-3)


def test_dropout_between_layers_is_the_same_forward_and_backward() -> None:
    ours, _, _ = layers("LSTM", 256, FP32, num_layers=2, dropout=0.5)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(0.5)
    x = torch.randn(100, 4, 256, device=CUDA, requires_grad=True)
    torch.manual_seed(5)
    y = ours(x)[0]
    assert type(y.grad_fn).__name__ == "LayersBackward"
    torch.manual_seed(5)
    assert_same_bits([y], [ours(x)[0]])
    assert not torch.equal(y, ours(x)[0])
    direction = torch.randn_like(x)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    differences = []
    with torch.no_grad():
        for sign in (1, -1):
            torch.manual_seed(5)
            differences.append(ours(x + sign * 1e-2 * direction)[0].double().sum())
    slope = (differences[0] - differences[1]) / 2e-2
    assert float(slope) == pytest.approx(float((gradient * direction).sum()), rel=0.05)
    ours.eval()
    assert_same_bits([ours(x)[0]], [ours(x)[0]])


def test_double_backward_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, _, _ = layers("GRU", 200, FP32, num_layers=2)
    x = torch.randn(100, 2, 200, device=CUDA)

    def second() -> list[Tensor]:
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(ours(given)[0].sum(), given, create_graph=True)
        return list(torch.autograd.grad(gradient.square().sum(), [given, *ours.parameters()]))

    found = second()
    one_layer_at_a_time(monkeypatch)
    for mine, other in zip(found, second(), strict=True):
        torch.testing.assert_close(mine, other, rtol=5e-3, atol=5e-3)


def test_backward_runs_twice_over_one_graph() -> None:
    ours, _, _ = layers("LSTM", 256, BF16, num_layers=3)
    x = torch.randn(130, 4, 256, device=CUDA, dtype=BF16, requires_grad=True)
    y = ours(x)[0]
    leaves = [x, *ours.parameters()]
    first = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    assert_same_bits(list(first), list(torch.autograd.grad(y.sum(), leaves)))


def test_a_step_is_captured_in_a_graph_and_replayed() -> None:
    ours, _, _ = layers("LSTM", 256, FP32, num_layers=3)
    x = torch.randn(130, 4, 256, device=CUDA, requires_grad=True)
    expected = results(ours, x.detach())
    stream = torch.cuda.Stream()
    leaves = [x, *ours.parameters()]
    with torch.cuda.stream(stream):
        generator = torch.Generator(CUDA).manual_seed(1)
        dy = torch.randn(expected[0].shape, generator=generator, device=CUDA, dtype=torch.float64)
        dy = dy.float()
        for _ in range(2):
            torch.autograd.grad(ours(x)[0], leaves, dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        y = ours(x)[0]
        found = [y.detach(), *torch.autograd.grad(y, leaves, dy)]
    for tensor in found:
        tensor.fill_(torch.nan)
    graph.replay()
    torch.cuda.synchronize()
    assert_same_bits(expected, found)


def test_memory_is_not_given_to_others_while_a_lane_uses_it() -> None:
    """Results stay the same while other work of the same stream allocates and writes at once."""
    ours, _, _ = layers("LSTM", 256, FP32, num_layers=4)
    x = torch.randn(200, 4, 256, device=CUDA)
    expected = results(ours, x)
    for _ in range(20):
        found = results(ours, x)
        for _ in range(8):
            torch.full((1 << 18,), torch.nan, device=CUDA)
        assert_same_bits(expected, found)


def test_two_streams_share_the_lanes() -> None:
    ours, _, _ = layers("LSTM", 256, FP32, num_layers=3)
    inputs = [torch.randn(130, 4, 256, device=CUDA) for _ in range(2)]
    expected = [results(ours, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(5):
        found = []
        for x, stream in zip(inputs, streams, strict=True):
            with torch.cuda.stream(stream):
                found.append(results(ours, x))
        torch.cuda.synchronize()
        for mine, its in zip(found, expected, strict=True):
            assert_same_bits(its, mine)
