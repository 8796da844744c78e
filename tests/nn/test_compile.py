"""torch.compile, torch.jit, torch.export and torch.fx take a swapped layer as they take torch's."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import (
    Operator,
    OperatorCase,
    assert_close,
    run,
    run_reference,
    tensors,
)

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning"),
    # The slowest tests here; a class that hands its calls on to torch's learns nothing from them.
    pytest.mark.needs("a forward of our own"),
]


@pytest.fixture(autouse=True)
def _fresh_dynamo() -> Iterator[None]:
    """Forget what other tests compiled: dynamo gives up on a code object after a few guards."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class _Counted:
    """A backend that runs the graph as it is and counts how often dynamo compiled."""

    def __init__(self) -> None:
        self.compilations = 0

    def __call__(self, graph: torch.fx.GraphModule, examples: Any) -> Any:
        self.compilations += 1
        return graph.forward


class _Model(nn.Module):
    """A user's model: dynamo compiles its frame, where it skips those of torch.nn's own modules."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, *inputs: torch.Tensor) -> Any:
        return self.layer(*inputs)


def test_compiled_without_a_graph_break_gives_right_values_and_gradients(
    operator: Operator, device: torch.device
) -> None:
    operator.require("fullgraph")
    layer, inputs = operator.build(device), operator.inputs(device)
    # "eager" would trace the same and check less.
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    results = run(compiled, inputs, layer.named_parameters())
    expected = run_reference(operator.case, layer, inputs)
    assert_close(results, expected, operator.case, torch.float32)
    with torch.no_grad():
        assert_close(tensors(compiled(*inputs)), expected.outputs, operator.case, torch.float32)


@pytest.mark.needs("a single input")
def test_compiled_in_default_mode_gives_right_values(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    compiled = torch.compile(nn.Sequential(layer), backend="aot_eager")
    results = run(compiled, inputs, layer.named_parameters())
    expected = run_reference(operator.case, layer, inputs)
    assert_close(results, expected, operator.case, torch.float32)


def test_dynamic_shapes_compile_once(operator: Operator, device: torch.device) -> None:
    operator.require("fullgraph")
    layer, inputs = operator.build(device), operator.inputs(device, requires_grad=False)
    backend = _Counted()
    compiled = torch.compile(layer, backend=backend, fullgraph=True, dynamic=True)
    for rows in (9, 10, 11):  # none of them another dimension's size
        part = tuple(torch.cat([x] * 3)[:rows] for x in inputs)
        expected = run_reference(operator.case, layer, part).outputs
        assert_close(tensors(compiled(*part)), expected, operator.case, torch.float32)
    assert backend.compilations == 1


def test_compiled_autocast_gives_the_type_of_the_eager_call(
    operator: Operator, device: torch.device
) -> None:
    operator.require("fullgraph")
    layer, inputs = operator.build(device), operator.inputs(device)

    def call(*xs: torch.Tensor) -> Any:
        with torch.autocast(device.type, torch.bfloat16):
            return layer(*xs)

    eager = tensors(call(*inputs))
    compiled = tensors(torch.compile(call, backend="aot_eager", fullgraph=True)(*inputs))
    assert [y.dtype for y in compiled] == [y.dtype for y in eager]
    assert_close(compiled, eager, operator.case, torch.bfloat16)


@pytest.mark.needs("a single input")
def test_swapping_inside_a_compiled_model_takes_effect(
    case: OperatorCase, device: torch.device
) -> None:
    torchs = Operator(case, "torch")
    torchs.require("fullgraph")
    layer, inputs = torchs.build(device), torchs.inputs(device, requires_grad=False)
    expected = run_reference(case, layer, inputs).outputs
    backend = _Counted()
    compiled = torch.compile(nn.Sequential(layer), backend=backend, fullgraph=True)
    for convert, cls in ((to_hfai, case.hfai_class), (to_torch, case.torch_class)):
        compiled(*inputs)
        before = backend.compilations
        assert convert(compiled) is compiled
        assert type(layer) is cls
        assert_close(tensors(compiled(*inputs)), expected, case, torch.float32)
        # Going back finds the first graph still there: only the first swap may need a new one
        # (it does in torch 2.13, whose guards hold the layer's class; 2.11's do not).
        assert backend.compilations - before <= (1 if convert is to_hfai else 0)


def test_a_model_compiled_in_place_can_be_swapped(case: OperatorCase, device: torch.device) -> None:
    torchs = Operator(case, "torch")
    torchs.require("fullgraph")
    layer, inputs = torchs.build(device), torchs.inputs(device)
    model = _Model(layer)
    model.compile(backend="eager", fullgraph=True)
    expected = run_reference(case, layer, inputs)
    assert_close(run(model, inputs, layer.named_parameters()), expected, case, torch.float32)
    to_hfai(model)
    assert type(layer) is case.hfai_class
    assert_close(run(model, inputs, layer.named_parameters()), expected, case, torch.float32)


def test_traced(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    traced = torch.jit.trace(layer, operator.inputs(device, seed=7))
    expected = run_reference(operator.case, layer, inputs)
    results = run(traced, inputs, layer.named_parameters())
    assert_close(results, expected, operator.case, torch.float32)


@pytest.mark.needs("a single input")
def test_scripted_saved_and_loaded(operator: Operator, device: torch.device) -> None:
    operator.require("script")
    layer, inputs = operator.build(device), operator.inputs(device)
    scripted = torch.jit.script(nn.Sequential(layer))
    expected = run_reference(operator.case, layer, inputs)
    results = run(scripted, inputs, layer.named_parameters())
    assert_close(results, expected, operator.case, torch.float32)
    file = io.BytesIO()
    torch.jit.save(scripted, file)
    file.seek(0)
    loaded = torch.jit.load(file)
    assert_close(tensors(loaded(*inputs)), expected.outputs, operator.case, torch.float32)


@pytest.mark.needs("a single input")
def test_a_scripted_model_is_left_as_it_is(case: OperatorCase, device: torch.device) -> None:
    torchs = Operator(case, "torch")
    torchs.require("script")
    layer, inputs = torchs.build(device), torchs.inputs(device)
    scripted = torch.jit.script(nn.Sequential(layer))
    classes = [type(module) for module in scripted.modules()]
    for convert in (to_hfai, to_torch):
        assert convert(scripted) is scripted
        assert [type(module) for module in scripted.modules()] == classes
    expected = run_reference(case, layer, inputs).outputs
    assert_close(tensors(scripted(*inputs)), expected, case, torch.float32)


@pytest.mark.needs("a single input")
def test_exported(operator: Operator, device: torch.device) -> None:
    operator.require("export")
    layer, inputs = operator.build(device), operator.inputs(device, requires_grad=False)
    batch = torch.export.Dim("batch", min=2, max=1024)
    program = torch.export.export(
        nn.Sequential(layer), inputs, dynamic_shapes=[{0: batch} for _ in inputs]
    )
    part = tuple(x[:2] for x in inputs)
    expected = run_reference(operator.case, layer, part).outputs
    assert_close(tensors(program.module()(*part)), expected, operator.case, torch.float32)
    # What is exported runs where hfai is not installed: torch's operators alone.
    targets = {str(n.target) for n in program.graph.nodes if n.op == "call_function"}
    assert targets
    assert all(target.startswith("aten.") for target in targets)


@pytest.mark.needs("a single input")
def test_symbolically_traced_by_fx(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    traced = torch.fx.symbolic_trace(nn.Sequential(layer))
    expected = run_reference(operator.case, layer, inputs)
    results = run(traced, inputs, layer.named_parameters())
    assert_close(results, expected, operator.case, torch.float32)
    # Nothing but the operator itself is in the graph: no look at the input's device or type.
    called = [n.target for n in traced.graph.nodes if n.op in ("call_function", "call_method")]
    assert called in ([], [operator.case.function])
