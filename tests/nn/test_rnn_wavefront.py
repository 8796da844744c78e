"""Stacks of layers as a wavefront, with each lane's work put off until somebody waits for it.

The launches are done by hand (`by_hand`), into the buffers that the wavefront gave them. What is
read before its lane was waited for is still poison.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfai.kernels.rnn import call, launch, stack, stretches, wavefront
from hfai.kernels.rnn.launch import Forward, Steps
from hfai.kernels.rnn.programs import Configuration
from hfai.nn import to_hfai
from tests.kernels.rnn import by_hand
from tests.kernels.rnn.by_hand import every_size_is_ours, kernels_on_cpu
from tests.nn.operator_cases import assert_same_bits

__all__ = ["every_size_is_ours", "kernels_on_cpu"]


class LazyLanes:
    """In place of the streams: a lane runs when the caller waits for it, and no sooner."""

    current: LazyLanes

    def __init__(self, device: int, layers: int) -> None:
        self.queues: list[list[Callable[[], None]]] = [[] for _ in range(layers)]
        self.run: list[int] = [0] * layers
        self.ends: dict[tuple[int, int], int] = {}
        LazyLanes.current = self

    def ready(self, layer: int, *, waits: bool) -> int:
        return layer

    def did(self, layer: int, turn: int) -> None:
        self.ends[layer, turn] = len(self.queues[layer])

    def wait_for(self, layer: int, turn: int) -> None:
        while self.run[layer] < self.ends[layer, turn]:
            self.run[layer] += 1
            self.queues[layer][self.run[layer] - 1]()

    def __enter__(self) -> LazyLanes:
        return self

    def __exit__(self, *_: object) -> None:
        for layer, queue in enumerate(self.queues):
            while self.run[layer] < len(queue):
                self.run[layer] += 1
                queue[self.run[layer] - 1]()


def enqueue_forward(
    configuration: Configuration,
    steps: Steps,
    gates: Tensor,
    weights: Any,
    biases: Any,
    h0: Tensor | None,
    c0: Tensor | None,
    made: Forward,
    exchange: Tensor,
    save: bool,
    stream: int,
) -> None:
    """As `launch.enqueue_forward`."""
    assert exchange.numel() >= launch.exchange_words(configuration, steps)
    assert bool((exchange == launch.UNSENT).all())
    assert gates.is_contiguous()

    def work() -> None:
        found = by_hand.forward(
            configuration, steps, gates, weights, biases, _one(h0), _one(c0), save
        )
        exchange.zero_()
        for name in ("y", "hn", "cn", "states", "cells"):
            source, target = getattr(found, name), getattr(made, name)
            if source is not None:
                assert target.is_contiguous()
                target.detach().copy_(source.view(target.shape))

    LazyLanes.current.queues[stream].append(work)


def _one(state: Tensor | None) -> Tensor | None:
    """Return a state as one direction's; c between stretches lies among the cells that way."""
    return None if state is None else state.view(1, BATCH, -1)


def enqueue_backward(
    configuration: Configuration,
    steps: Steps,
    saved: Any,
    weights: Any,
    gradients: Any,
    made: Any,
    mailbox: Tensor,
    stream: int,
) -> None:
    """As `launch.enqueue_backward`."""
    assert not mailbox.any()
    made[0].fill_(math.nan)
    kept, cells, states, c0 = saved

    def work() -> None:
        mailbox.fill_(1.0)
        dy, dhn, dcn = gradients
        found = by_hand.backward(
            configuration,
            steps,
            kept,
            cells,
            states,
            weights,
            _one(c0),
            dy,
            _one(dhn),
            _one(dcn),
        )
        for source, target in zip(found, made, strict=True):
            if target is not None and source is not None:
                assert target.is_contiguous()
                target.copy_(source.view(target.shape))

    LazyLanes.current.queues[stream].append(work)


@pytest.fixture(autouse=True)
def _lazy(monkeypatch: pytest.MonkeyPatch, kernels_on_cpu: list[str]) -> None:
    monkeypatch.setattr(stretches, "STRETCH_ON_HOST", 0.0)
    monkeypatch.setattr(stretches, "MOST_STRETCHES", 3)
    monkeypatch.setattr(wavefront, "Lanes", LazyLanes)
    monkeypatch.setattr(launch, "enqueue_forward", enqueue_forward)
    monkeypatch.setattr(launch, "enqueue_backward", enqueue_backward)


STEPS, BATCH, INPUTS, HIDDEN = 11, 3, 5, 6
KINDS = ["LSTM", "GRU", "RNN"]


def everything(layer: nn.Module, x: Tensor, states: tuple[Tensor, ...]) -> list[Tensor]:
    """Return y, the last states, and the gradients of x, the first states and all parameters."""
    leaves = [x.clone().requires_grad_(), *(state.clone().requires_grad_() for state in states)]
    hx: Any = None if not states else leaves[1] if len(states) == 1 else tuple(leaves[1:])
    y, last = layer(leaves[0], hx)
    outputs = [y, *((last,) if isinstance(last, Tensor) else last)]
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(o.shape, generator=generator, dtype=torch.float32) for o in outputs]
    found = torch.autograd.grad(
        outputs, [*leaves, *layer.parameters()], [g.to(y.dtype) for g in grads]
    )
    return [*(output.detach() for output in outputs), *found]


def states_of(kind: str, layers: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    shape = (layers, BATCH, HIDDEN)
    return tuple(torch.randn(shape, dtype=dtype) for _ in range(2 if kind == "LSTM" else 1))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("options", "given"),
    [
        ({"num_layers": 2}, True),
        ({"num_layers": 4, "bias": False}, False),
        ({"num_layers": 3, "batch_first": True}, True),
    ],
    ids=str,
)
def test_a_wavefront_gives_what_torchs_layers_give(
    kind: str, options: dict[str, Any], given: bool
) -> None:
    torchs: nn.Module = getattr(nn, kind)(INPUTS, HIDDEN, **options)
    ours = to_hfai(copy.deepcopy(torchs))
    x = torch.randn(BATCH, STEPS, INPUTS)
    if not options.get("batch_first"):
        x = x.transpose(0, 1)
    states = states_of(kind, options["num_layers"], torch.float32) if given else ()
    assert "LayersBackward" in names_of_nodes(ours(x)[0])
    for mine, its in zip(everything(ours, x, states), everything(torchs, x, states), strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def names_of_nodes(y: Tensor) -> set[str]:
    names, todo = set(), [y.grad_fn]
    while todo:
        node = todo.pop()
        if node is not None and node.name() not in names:
            names.add(node.name())
            todo += [after for after, _ in node.next_functions]
    return names


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_rounds_states_between_stretches_and_no_more(dtype: torch.dtype) -> None:
    torchs = nn.LSTM(INPUTS, HIDDEN, 2)
    x = torch.randn(STEPS, BATCH, INPUTS).to(dtype)
    ours = to_hfai(copy.deepcopy(torchs)).to(dtype)
    exact = torchs.to(dtype).double()
    states = states_of("LSTM", 2, dtype)
    found = everything(ours, x, states)
    expected = everything(exact, x.double(), tuple(state.double() for state in states))
    tolerance = 4e-3 if dtype is torch.float16 else 3e-2
    for mine, its in zip(found, expected, strict=True):
        assert float((mine.double() - its).norm() / its.norm()) < tolerance


def test_without_gradients_nothing_is_kept_and_the_bits_are_the_same() -> None:
    ours = to_hfai(nn.LSTM(INPUTS, HIDDEN, 3))
    x = torch.randn(STEPS, BATCH, INPUTS)
    with torch.no_grad():
        y, (hn, cn) = ours(x)
    assert y.grad_fn is None
    found = everything(ours, x, ())
    assert_same_bits([y, hn, cn], found[:3])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_is_between_layers_alone_and_gradients_go_through_its_mask(kind: str) -> None:
    ours = to_hfai(getattr(nn, kind)(INPUTS, HIDDEN, 2, dropout=0.5))
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    torch.manual_seed(1)
    y = ours(x)[0]
    leaves = [x, *ours.parameters()]
    by_kernels = torch.autograd.grad(y.sum(), leaves, retain_graph=True)
    # torch's own operators, with the masks that forward drew.
    by_formula = torch.autograd.grad(y.sum(), leaves, create_graph=True)
    for mine, its in zip(by_kernels, by_formula, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
    torch.manual_seed(1)
    assert_same_bits([y], [ours(x)[0]])
    assert not torch.equal(y, ours(x)[0])
    ours.eval()
    assert_same_bits([ours(x)[0]], [ours(x)[0]])


def test_no_dropout_is_applied_in_evaluation_or_above_the_last_layer() -> None:
    ours = to_hfai(nn.GRU(INPUTS, HIDDEN, 2, dropout=1.0))
    x = torch.randn(STEPS, BATCH, INPUTS)
    y = ours(x)[0]
    assert bool(y.any())
    # All of the second layer's input is dropped: x no longer matters.
    assert_same_bits([y], [ours(torch.randn_like(x))[0]])
    ours.eval()
    assert not torch.equal(ours(x)[0], ours(torch.randn_like(x))[0])


def test_double_backward_is_torchs() -> None:
    torchs = nn.LSTM(INPUTS, HIDDEN, 2)
    ours = to_hfai(copy.deepcopy(torchs))
    x = torch.randn(STEPS, BATCH, INPUTS)
    found = []
    for layer in (ours, torchs):
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(given)[0].square().sum(), given, create_graph=True)
        leaves = [given, *layer.parameters()]
        found.append(torch.autograd.grad(gradient.square().sum(), leaves, allow_unused=True))
    for mine, its in zip(*found, strict=True):
        assert (mine is None) == (its is None)
        if mine is not None:
            torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


def test_only_what_is_asked_for_has_a_gradient() -> None:
    ours = to_hfai(nn.LSTM(INPUTS, HIDDEN, 2))
    expected = everything(ours, x := torch.randn(STEPS, BATCH, INPUTS), ())
    frozen = copy.deepcopy(ours)
    for name, parameter in frozen.named_parameters():
        parameter.requires_grad_(name == "weight_hh_l0")
    y, (hn, cn) = frozen(x)
    generator = torch.Generator().manual_seed(3)
    grads = [torch.randn(o.shape, generator=generator) for o in (y, hn, cn)]
    torch.autograd.backward([y, hn, cn], grads)
    for name, parameter in frozen.named_parameters():
        assert (parameter.grad is not None) == (name == "weight_hh_l0")
    assert_same_bits([frozen.weight_hh_l0.grad], [expected[3 + 1 + 1]])


def test_a_gradient_of_the_last_cell_alone_flows_back() -> None:
    torchs = nn.LSTM(INPUTS, HIDDEN, 2)
    ours = to_hfai(copy.deepcopy(torchs))
    x = torch.randn(STEPS, BATCH, INPUTS)
    found = []
    for layer in (ours, torchs):
        given = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(layer(given)[1][1].sum(), given)
        found.append(gradient)
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-6)


def test_hooks_on_saved_tensors_are_obeyed() -> None:
    ours = to_hfai(nn.GRU(INPUTS, HIDDEN, 2))
    x = torch.randn(STEPS, BATCH, INPUTS, requires_grad=True)
    leaves = [x, *ours.parameters()]
    expected = torch.autograd.grad(ours(x)[0].sum(), leaves)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t * 1):
        y = ours(x)[0]
    for mine, its in zip(torch.autograd.grad(y.sum(), leaves), expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{"bidirectional": True}, {}], ids=str)
def test_other_layers_run_one_after_the_other(
    options: dict[str, Any], kernels_on_cpu: list[str]
) -> None:
    layers = 2 if options else 1
    ours = to_hfai(nn.LSTM(INPUTS, HIDDEN, layers, **options))
    ours(torch.randn(STEPS, BATCH, INPUTS))
    assert kernels_on_cpu == ["forward"] * layers


def test_packed_sequences_run_one_layer_after_the_other(kernels_on_cpu: list[str]) -> None:
    ours = to_hfai(nn.LSTM(INPUTS, HIDDEN, 2))
    packed = nn.utils.rnn.pack_padded_sequence(torch.randn(STEPS, 2, INPUTS), [STEPS, 4])
    ours(packed)
    assert kernels_on_cpu == ["forward"] * 2


def test_a_refused_launch_ends_with_all_lanes_done_and_torch_has_the_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torchs = nn.LSTM(INPUTS, HIDDEN, 2)
    ours = to_hfai(copy.deepcopy(torchs))
    real, calls = launch.enqueue_forward, []

    def refusing(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            raise call.RefusedError("no room")
        real(*arguments)

    monkeypatch.setattr(launch, "enqueue_forward", refusing)
    x = torch.randn(STEPS, BATCH, INPUTS)
    try:
        y = ours(x)[0]
        torch.testing.assert_close(y, torchs(x)[0])
        lanes = LazyLanes.current
        assert lanes.run == [len(queue) for queue in lanes.queues]
        ours(x)
        assert len(calls) == 3  # remembered
    finally:
        call.refused.clear()


def test_the_node_is_one_for_all_layers() -> None:
    assert stack.Layers.__name__ == "Layers"
    y = to_hfai(nn.LSTM(INPUTS, HIDDEN, 4))(torch.randn(STEPS, BATCH, INPUTS))[0]
    assert y.grad_fn is not None
    assert y.grad_fn.name() == "LayersBackward"
