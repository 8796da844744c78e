"""A step through the kernels' own sources, by autograd.py and node.cpp, against torch's cells."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfai.kernels import coverage
from hfai.kernels.cell import autograd
from hfai.kernels.rnn.plan import Cell
from tests.kernels.cell.on_cpu import HostConfiguration
from tests.kernels.rnn.emulated import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the emulation")

FP32, FP16 = torch.float32, torch.float16
TOLERANCES = {FP32: 2e-6, FP16: 4e-3}
KINDS = [
    pytest.param((Cell.LSTM, FP32), id="LSTM"),
    pytest.param((Cell.GRU, FP16), id="GRU-fp16"),
    pytest.param((Cell.RNN_RELU, FP32), id="RNN-relu"),
]
configuration_of = functools.cache(HostConfiguration)


@pytest.fixture(autouse=True)
def _on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    def why_not_plain(tensor: Tensor) -> str | None:
        reason = coverage.why_not_plain(tensor)
        return None if reason is not None and "on cpu" in reason else reason

    monkeypatch.setattr(autograd, "why_not_plain", why_not_plain)
    monkeypatch.setattr(autograd, "current_device", lambda: -1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


@pytest.fixture(params=["python", "node"])
def run_of(request: pytest.FixtureRequest) -> Callable[[HostConfiguration], Callable[..., Any]]:
    """How a configuration's steps are made: by autograd.py, then by node.cpp."""
    if request.param == "python":
        return lambda configuration: functools.partial(autograd.run, configuration)
    module = autograd.EXTENSION.wait()
    if module is None:
        pytest.skip(f"needs node.cpp compiled: {autograd.EXTENSION.reason}")

    def through_node(configuration: HostConfiguration) -> Callable[..., Any]:
        kernels = (configuration.forward, configuration.backward, configuration.add_sums)
        descriptions = tuple(kernel.description for kernel in kernels)
        return functools.partial(
            module.step, autograd.node_call(module, configuration, descriptions)
        )

    return through_node


def cell_of(cell: Cell, inputs: int, hidden: int, *, bias: bool = True) -> nn.RNNCellBase:
    if cell is Cell.LSTM:
        return nn.LSTMCell(inputs, hidden, bias)
    if cell is Cell.GRU:
        return nn.GRUCell(inputs, hidden, bias)
    return nn.RNNCell(inputs, hidden, bias, "relu" if cell is Cell.RNN_RELU else "tanh")


def operands_of(module: nn.RNNCellBase, x: Tensor, h: Tensor, c: Tensor | None) -> list[Any]:
    parameters = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    return [x, h, c, *parameters]


def draw(cell: Cell, dtype: torch.dtype, batch: int, inputs: int, hidden: int) -> list[Any]:
    states = [torch.randn(batch, hidden).to(dtype).requires_grad_() for _ in range(2)]
    x = torch.randn(batch, inputs).to(dtype).requires_grad_()
    return [x, states[0], states[1] if cell.has_c else None]


def gradients(outputs: Any, wanted: list[Any], only: int | None = None) -> list[Tensor]:
    chosen = list(outputs) if only is None else [outputs[only]]
    generator = torch.Generator().manual_seed(5)
    given = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in chosen]
    leaves = [tensor for tensor in wanted if tensor is not None]
    return list(torch.autograd.grad(chosen, leaves, given, retain_graph=True))


def expected(module: nn.RNNCellBase, given: list[Any], only: int | None = None) -> list[Tensor]:
    """Return torch's outputs and gradients in float64."""
    double = copy.deepcopy(module).double()
    x, h, c = (None if t is None else t.detach().double().requires_grad_() for t in given)
    outputs = double(x, h if c is None else (h, c))
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    return [*outputs, *gradients(outputs, operands_of(double, x, h, c), only)]


def assert_all_close(ours: list[Tensor], theirs: list[Tensor], dtype: torch.dtype) -> None:
    for one, other in zip(ours, theirs, strict=True):
        scale = max(1.0, other.abs().max().item())
        tolerance = TOLERANCES[dtype] * scale
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


# 3 rows make one group of rows, 70 two; 40 units take two blocks side by side.
@pytest.mark.parametrize(("batch", "hidden"), [(3, 40), (70, 5)])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_torchs(
    kind: tuple[Cell, torch.dtype], batch: int, hidden: int, run_of: Any
) -> None:
    cell, dtype = kind
    module = cell_of(cell, 7, hidden).to(dtype)
    given = draw(cell, dtype, batch, 7, hidden)
    operands = operands_of(module, *given)
    configuration = configuration_of(cell, dtype)
    before = configuration.backward.launches
    outputs = run_of(configuration)(*operands)
    ours = [*outputs, *gradients(outputs, operands)]
    assert configuration.backward.launches == before + 1
    assert_all_close(ours, expected(module, given), dtype)
    again = gradients(outputs, operands)
    assert all(
        torch.equal(one, other) for one, other in zip(ours[len(outputs) :], again, strict=True)
    )


@pytest.mark.parametrize("only", [0, 1])
def test_a_gradient_of_one_output_alone(only: int, run_of: Any) -> None:
    module, given = cell_of(Cell.LSTM, 6, 9, bias=False), draw(Cell.LSTM, FP32, 4, 6, 9)
    operands = operands_of(module, *given)
    outputs = run_of(configuration_of(Cell.LSTM, FP32))(*operands)
    ours = [*outputs, *gradients(outputs, operands, only)]
    assert_all_close(ours, expected(module, given, only), FP32)


@pytest.mark.parametrize("wanted", [1, 2, 4, 6])
def test_only_what_is_asked_for_gets_a_gradient(wanted: int, run_of: Any) -> None:
    module, given = cell_of(Cell.LSTM, 6, 9), draw(Cell.LSTM, FP32, 4, 6, 9)
    operands = operands_of(module, *given)
    theirs = expected(module, given)[2:]
    for i, tensor in enumerate(operands):
        tensor.requires_grad_(i == wanted)
    outputs = run_of(configuration_of(Cell.LSTM, FP32))(*operands)
    (ours,) = gradients(outputs, [operands[wanted]])
    assert_all_close([ours], [theirs[wanted]], FP32)


def test_the_gradients_gradient_is_torchs(run_of: Any) -> None:
    module, given = cell_of(Cell.LSTM, 3, 4), draw(Cell.LSTM, FP32, 2, 3, 4)

    def second(step: Callable[..., Any], module: nn.RNNCellBase, given: list[Any]) -> list[Tensor]:
        y, _ = step(*operands_of(module, *given))
        (dx,) = torch.autograd.grad(y.square().sum(), [given[0]], create_graph=True)
        return list(torch.autograd.grad(dx.square().sum(), [given[2], module.weight_hh]))

    ours = second(run_of(configuration_of(Cell.LSTM, FP32)), module, given)
    double = copy.deepcopy(module).double()
    doubles = [t.detach().double().requires_grad_() for t in given]
    theirs = second(lambda x, h, c, *_: double(x, (h, c)), double, doubles)
    assert_all_close(ours, theirs, FP32)


@pytest.mark.parametrize("cell", [Cell.LSTM, Cell.GRU, Cell.RNN_TANH])
def test_gradients_to_be_differentiated_count_each_path_once(cell: Cell, run_of: Any) -> None:
    module, (x, h, _) = cell_of(cell, 4, 4), draw(cell, FP32, 2, 4, 4)

    def first(step: Callable[..., Any], module: nn.RNNCellBase, x: Tensor, h: Tensor) -> Any:
        states = [h, h] if cell.has_c else [h, None]  # the same tensor in two places
        for _ in range(3):
            states = [*step(*operands_of(module, x, *states)), None][:2]
        parameters = [x, h, *module.parameters()]
        return list(torch.autograd.grad(states[0].square().sum(), parameters, create_graph=True))

    ours = first(run_of(configuration_of(cell, FP32)), module, x, h)
    double = copy.deepcopy(module).double()

    def by_torch(x: Tensor, h: Tensor, c: Tensor | None, *_: Tensor) -> Any:
        outputs = double(x, h if c is None else (h, c))
        return outputs if cell.has_c else (outputs,)

    doubles = [t.detach().double().requires_grad_() for t in (x, h)]
    assert_all_close(ours, first(by_torch, double, *doubles), FP32)


def test_without_gradients_nothing_is_saved_and_the_bits_are_the_same(run_of: Any) -> None:
    module, given = cell_of(Cell.LSTM, 6, 9), draw(Cell.LSTM, FP32, 4, 6, 9)
    run = run_of(configuration_of(Cell.LSTM, FP32))
    with_graph = run(*operands_of(module, *given))
    with torch.no_grad():
        without = run(*operands_of(module, *given))
    assert all(y.grad_fn is None for y in without)
    assert all(torch.equal(one, other) for one, other in zip(with_graph, without, strict=True))


def test_strides_of_any_kind_are_taken(run_of: Any) -> None:
    module = cell_of(Cell.LSTM, 6, 9)
    x, h, c = torch.randn(6, 4).t(), torch.randn(4, 18)[:, ::2], torch.randn(1, 9).expand(4, 9)
    given = [x.requires_grad_(), h.requires_grad_(), c.requires_grad_()]
    outputs = run_of(configuration_of(Cell.LSTM, FP32))(*operands_of(module, *given))
    ours = [*outputs, *gradients(outputs, operands_of(module, *given))]
    assert_all_close(ours, expected(module, given), FP32)


def test_an_output_changed_in_place_is_noticed(run_of: Any) -> None:
    module, given = cell_of(Cell.LSTM, 6, 9), draw(Cell.LSTM, FP32, 4, 6, 9)
    y, c = run_of(configuration_of(Cell.LSTM, FP32))(*operands_of(module, *given))
    c.mul_(2)
    with pytest.raises(RuntimeError, match="inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize(
    "change",
    [
        lambda operands: operands.__setitem__(0, torch.randn(4, 5)),
        lambda operands: operands.__setitem__(0, torch.randn(6)),
        lambda operands: operands.__setitem__(0, torch.randn(0, 6)),
        lambda operands: operands.__setitem__(1, torch.randn(4, 9, dtype=torch.float64)),
        lambda operands: operands.__setitem__(2, torch.randn(3, 9)),
        lambda operands: operands.__setitem__(5, None),
        lambda operands: operands.__setitem__(3, torch.randn(36, 6).to_sparse()),
        lambda operands: operands.__setitem__(0, torch.nested.nested_tensor([torch.randn(6)] * 4)),
    ],
)
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_what_does_not_fit_is_torchs(change: Callable[[list[Any]], None], run_of: Any) -> None:
    operands = operands_of(cell_of(Cell.LSTM, 6, 9), *draw(Cell.LSTM, FP32, 4, 6, 9))
    change(operands)
    assert run_of(configuration_of(Cell.LSTM, FP32))(*operands) is None
