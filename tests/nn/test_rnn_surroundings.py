"""Recurrent layers on the kernels' path within what users build around them: as torch's there.

Gradients of gradients over a carried state, hooks on saved tensors, batched gradients, tracers and
compilers, sequences packed by hand, a device that refuses.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hfai.kernels.cooperative import RefusedError
from hfai.kernels.rnn import launch
from hfai.kernels.rnn.programs import Configuration, refused
from hfai.nn import to_hfai
from tests.kernels.rnn.by_hand import every_size_is_ours, kernels_on_cpu

__all__ = ["every_size_is_ours", "kernels_on_cpu"]

KINDS = ("LSTM", "GRU", "RNN")


@pytest.fixture
def launches(request: pytest.FixtureRequest, device: torch.device) -> list[str]:
    """Put layers on the kernels' path; the launches since, where there is no GPU."""
    if device.type != "cpu":
        request.getfixturevalue("every_size_is_ours")
        return ["forward", "backward"]
    made: list[str] = request.getfixturevalue("kernels_on_cpu")
    return made


@pytest.fixture
def both(launches: list[str], device: torch.device) -> Callable[..., tuple[nn.Module, nn.Module]]:
    """Build torch's layer and ours with the same parameters."""

    def build(kind: str, *sizes: int, **options: Any) -> tuple[nn.Module, nn.Module]:
        torch.manual_seed(1)
        layer: nn.Module = getattr(nn, kind)(*sizes, **options)
        return layer.to(device), to_hfai(copy.deepcopy(layer)).to(device)

    return build


def assert_close(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-3, atol=2e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_to_be_differentiated_count_each_path_once(kind: str, both: Any) -> None:
    found = []
    for layer in both(kind, 4, 5):
        x = torch.linspace(-1, 1, 24).view(3, 2, 4).to(layer.weight_hh_l0.device).requires_grad_()
        _, state = layer(x)  # the second call's state is made of the parameters, as its weights are
        loss = layer(x, state)[0].square().sum()
        inputs = [x, *layer.parameters()]
        first = torch.autograd.grad(loss, inputs, create_graph=True)
        penalty = sum(g.square().sum() for g in first)
        found.append((first, torch.autograd.grad(penalty, inputs)))
    for ours, torchs in zip(found[1], found[0], strict=True):
        assert_close(ours, torchs)


def test_a_parameter_in_two_places_has_one_gradient_to_be_differentiated(both: Any) -> None:
    found = []
    for layer in both("LSTM", 4, 5, bidirectional=True):
        layer.bias_hh_l0 = layer.bias_ih_l0
        layer.weight_hh_l0_reverse = layer.weight_hh_l0
        x = torch.ones(3, 2, 4, device=layer.weight_hh_l0.device)
        loss = layer(x)[0].square().sum()
        found.append(torch.autograd.grad(loss, list(layer.parameters()), create_graph=True))
    assert_close(found[1], found[0])


def test_gradients_of_odd_sizes_can_be_flattened(both: Any, device: torch.device) -> None:
    _, ours = both("LSTM", 131, 131)
    x = torch.randn(64, 32, 131, device=device, requires_grad=True)
    gradients = torch.autograd.grad(ours(x)[0].sum(), [x, *ours.parameters()])
    assert torch.cat([g.view(-1) for g in gradients]).isfinite().all()


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor


def test_saved_tensors_may_come_back_in_another_layout_or_type(
    both: Any, device: torch.device
) -> None:
    torchs, ours = both("GRU", 6, 7)
    x = torch.randn(3, 2, 6, device=device)
    expected = torch.autograd.grad(torchs(x)[0].sum(), list(torchs.parameters()))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, _transposed):
        y = ours(x)[0].sum()
    assert_close(torch.autograd.grad(y, list(ours.parameters())), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t):
        y = ours(x)[0].sum()
    assert_close(torch.autograd.grad(y, list(ours.parameters())), expected)


def test_batched_gradients(both: Any, device: torch.device) -> None:
    _, ours = both("LSTM", 4, 5)
    x = torch.randn(3, 2, 4, device=device, requires_grad=True)
    y = ours(x)[0]
    several = torch.randn(4, *y.shape, device=device)
    (batched,) = torch.autograd.grad(y, [x], several, retain_graph=True, is_grads_batched=True)
    alone = [torch.autograd.grad(y, [x], one, retain_graph=True)[0] for one in several]
    assert_close([batched], [torch.stack(alone)])


def test_an_output_made_without_gradients_can_be_changed_in_place(
    both: Any, device: torch.device
) -> None:
    gate = torch.full((), 2.0, device=device, requires_grad=True)
    for layer in both("GRU", 4, 5):
        with torch.no_grad():
            y, _ = layer(torch.ones(3, 2, 4, device=device))
        before = y.clone()
        y.mul_(gate)
        assert_close([y], [2 * before])


@pytest.mark.parametrize(
    "sizes",
    [[2, 3], [4, 3, -2], [0, 5], [3, 1, 1, 0, 1], [2, 2], [[3, 2]]],
    ids=str,
)
def test_sizes_that_no_packed_sequence_has_are_torchs_to_refuse(
    sizes: list[Any], both: Any, device: torch.device, launches: list[str]
) -> None:
    launches = list(launches) if device.type != "cpu" else launches
    layers, outcomes = both("GRU", 4, 5), []
    before = len(launches)
    for layer in layers:
        packed = PackedSequence(torch.ones(5, 4, device=device), torch.tensor(sizes))
        try:
            outcomes.append(tuple(layer(packed)[0].data.shape))
        except Exception as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]
    assert len(launches) == before


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_a_compiled_model_runs_torchs_layer(kind: str, both: Any, device: torch.device) -> None:
    torchs, ours = both(kind, 4, 5)
    x = torch.randn(3, 2, 4, device=device)
    model = torch.compile(nn.ModuleDict({"layer": ours})["layer"], backend="eager")
    try:
        assert_close([model(x)[0]], [torchs(x)[0]])
        assert_close([torch.compile(lambda x: ours(x)[0], backend="eager")(x)], [torchs(x)[0]])
    finally:
        torch.compiler.reset()


class _Decoder(nn.Module):
    """Starts from zeros that are no argument: what is traced is the state alone."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, state: Any) -> Any:
        return self.layer(torch.zeros(3, 2, 4), state)


def test_torch_fx_records_a_layer_of_which_the_state_alone_is_traced() -> None:
    for kind in ("LSTM", "GRU"):
        layer = to_hfai(getattr(nn, kind)(4, 5))
        graph = torch.fx.symbolic_trace(_Decoder(layer)).graph
        assert "call_module" in [node.op for node in graph.nodes]
    cell = to_hfai(nn.LSTMCell(4, 5))
    assert "call_module" in [
        node.op for node in torch.fx.symbolic_trace(_Decoder(cell)).graph.nodes
    ]


def test_a_device_that_refuses_backward_is_remembered_and_gradients_are_right(
    both: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs, ours = both("LSTM", 4, 5)
    x = torch.randn(3, 2, 4, device=device)

    def refuse(*arguments: Any) -> Any:
        raise RefusedError("no room for 124 blocks")

    monkeypatch.setattr(launch, "backward", refuse)
    results = [torch.autograd.grad(m(x)[0].sum(), list(m.parameters())) for m in (torchs, ours)]
    try:
        assert_close(results[1], results[0])
        assert list(refused.values()) == ["no room for 124 blocks"]
        assert ours(x)[0].grad_fn.name() == torchs(x)[0].grad_fn.name()  # torch's from now on
    finally:
        refused.clear()


def test_a_device_that_would_refuse_backward_is_asked_before_forward(
    both: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs, ours = both("GRU", 4, 5)
    x = torch.randn(3, 2, 4, device=device)
    monkeypatch.setattr(Configuration, "refuses", lambda self: "no room")
    assert ours(x)[0].grad_fn.name() == torchs(x)[0].grad_fn.name()
    try:
        assert list(refused.values()) == ["no room"]
    finally:
        refused.clear()


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("kind", ["LSTMCell", "GRUCell", "RNNCell"])
def test_scripting_leaves_a_model_of_cells_as_it_is(kind: str) -> None:
    torchs = nn.Sequential(getattr(nn, kind)(6, 5))
    ours = to_hfai(copy.deepcopy(torchs))
    cell, cell_class = ours[0], type(ours[0])
    scripted = torch.jit.script(ours)
    assert ours[0] is cell
    assert type(cell) is cell_class
    x = torch.randn(3, 6)
    state = torchs(x)
    torch.testing.assert_close(scripted(x), state)
    torch.testing.assert_close(torch.jit.script(cell)(x, state), torchs[0](x, state))
