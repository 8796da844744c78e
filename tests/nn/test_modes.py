"""Autocast, modes, tensor subclasses, fake tensors: whoever watches torch's operators sees ours."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.nn.operator_cases import (
    Operator,
    OperatorCase,
    Results,
    assert_close,
    assert_same_bits,
    run,
    run_reference,
    tensors,
    weighted_sum,
)

HALF_AND_SINGLE = [torch.float32, torch.bfloat16]


class _Functions(TorchFunctionMode):
    """Keeps every torch function that is called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Callable[..., Any]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class _Operators(TorchDispatchMode):
    """Keeps every ATen operator that is dispatched."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(func)
        return func(*args, **(kwargs or {}))


class _Tagged(Tensor):
    """A subclass that notes what is called on it; its results are tagged too."""

    seen: list[Callable[..., Any]] = []  # noqa: RUF012 (one list for all, emptied by the tests)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.seen.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_on_the_cpu_results_are_torchs_to_the_bit(case: OperatorCase, dtype: torch.dtype) -> None:
    results = []
    for flavour in ("torch", "hfai"):
        operator = Operator(case, flavour)
        results.append(run(operator.build(dtype=dtype), operator.inputs(dtype=dtype)))
    assert_same_bits(*results)


def test_in_double_results_are_torchs_to_the_bit(case: OperatorCase, device: torch.device) -> None:
    results = []
    for flavour in ("torch", "hfai"):
        operator = Operator(case, flavour)
        layer = operator.build(device, torch.float64)
        results.append(run(layer, operator.inputs(device, torch.float64)))
    assert_same_bits(*results)


@pytest.mark.parametrize("weights", HALF_AND_SINGLE)
@pytest.mark.parametrize("inputs", HALF_AND_SINGLE)
@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
def test_autocast_gives_the_types_and_values_that_torch_gives(
    case: OperatorCase, device: torch.device, inputs: torch.dtype, weights: torch.dtype
) -> None:
    def outcome(operator: Operator) -> Results | str:
        layer = operator.build(device, weights)
        call = torch.autocast(device.type, torch.bfloat16)(layer.forward)
        try:
            return run(call, operator.inputs(device, inputs), layer.named_parameters())
        except RuntimeError as error:
            return str(error)

    torchs, ours = (outcome(Operator(case, flavour)) for flavour in ("torch", "hfai"))
    half = "full precision under autocast" in case.unsupported
    half = half or torch.bfloat16 in (inputs, weights)
    coarsest = torch.bfloat16 if half else torch.float32
    if isinstance(torchs, str):
        # torch refuses this mix of types. Ours may take it, and otherwise says the same.
        if isinstance(ours, str):
            assert ours == torchs
            return
        operator = Operator(case, "hfai")
        layer, given = operator.build(device, weights), operator.inputs(device, inputs)
        assert_close(ours, run_reference(case, layer, given), case, coarsest)
        return
    assert isinstance(ours, Results)
    assert [y.dtype for y in ours.outputs] == [y.dtype for y in torchs.outputs]
    for name, gradient in ours.gradients.items():
        assert gradient.dtype == torchs.gradients[name].dtype
    assert_close(ours, torchs, case, coarsest)


def test_autocast_switched_off_inside_is_respected(
    operator: Operator, device: torch.device
) -> None:
    layer = operator.build(device, torch.bfloat16)
    inputs = operator.inputs(device, torch.bfloat16)
    plain = run(layer, inputs)

    def nested(*xs: Tensor) -> Any:
        with (
            torch.autocast(device.type, torch.bfloat16),
            torch.autocast(device.type, enabled=False),
        ):
            return layer(*xs)

    results = run(nested, inputs, layer.named_parameters())
    assert {y.dtype for y in results.outputs} == {torch.bfloat16}
    assert_same_bits(results, plain)


def test_a_function_mode_sees_torchs_function(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    expected = run_reference(operator.case, layer, inputs)
    with _Functions() as mode:
        outputs = tensors(layer(*inputs))
    assert operator.case.function in mode.seen
    assert_close(outputs, expected.outputs, operator.case, torch.float32)


def test_a_dispatch_mode_sees_torchs_operators(case: OperatorCase, device: torch.device) -> None:
    seen = []
    for flavour in ("torch", "hfai"):
        operator = Operator(case, flavour)
        layer, inputs = operator.build(device), operator.inputs(device)
        expected = run_reference(case, layer, inputs)
        with _Operators() as mode:
            outputs = tensors(layer(*inputs))
            weighted_sum(outputs).backward()
        assert_close(outputs, expected.outputs, case, torch.float32)
        seen.append(mode.seen)
    assert seen[0]
    assert seen[1] == seen[0]


def test_a_subclass_as_input_sees_the_call_and_comes_out(
    operator: Operator, device: torch.device
) -> None:
    operator.require("subclass")
    layer = operator.build(device)
    inputs = operator.inputs(device, requires_grad=False)
    expected = tensors(layer(*inputs))
    _Tagged.seen.clear()
    outputs = tensors(layer(*(x.as_subclass(_Tagged) for x in inputs)))
    assert operator.case.function in _Tagged.seen
    assert all(type(y) is _Tagged for y in outputs)
    plain = tuple(y.as_subclass(Tensor) for y in outputs)
    assert_close(plain, expected, operator.case, torch.float32)


@pytest.mark.needs("parameters of its own")
def test_a_subclass_as_weight_sees_the_call(operator: Operator, device: torch.device) -> None:
    operator.require("subclass")
    layer = operator.build(device)
    inputs = operator.inputs(device, requires_grad=False)
    expected = tensors(layer(*inputs))
    name = next(name for name, _ in layer.named_parameters())
    weight = getattr(layer, name).detach().as_subclass(_Tagged)
    setattr(layer, name, nn.Parameter(weight))
    _Tagged.seen.clear()
    outputs = tensors(layer(*inputs))
    assert operator.case.function in _Tagged.seen
    plain = tuple(y.as_subclass(Tensor) for y in outputs)
    assert_close(plain, expected, operator.case, torch.float32)


def test_fake_tensors_give_fake_outputs(operator: Operator) -> None:
    layer, inputs = operator.build(), operator.inputs()
    real = tensors(layer(*inputs))
    with FakeTensorMode() as mode:
        outputs = tensors(
            torch.func.functional_call(
                layer,
                {name: mode.from_tensor(p) for name, p in layer.named_parameters()},
                tuple(mode.from_tensor(x) for x in inputs),
            )
        )
        weighted_sum(outputs).backward()
    assert all(isinstance(y, FakeTensor) for y in outputs)
    assert [(y.shape, y.stride(), y.dtype) for y in outputs] == [
        (y.shape, y.stride(), y.dtype) for y in real
    ]


def test_fake_tensors_of_a_gpu_need_no_gpu(operator: Operator) -> None:
    operator.require("fake tensors of a GPU that is not there")
    with FakeTensorMode(), torch.no_grad():
        layer = operator.cls(
            *operator.case.arguments, **operator.case.keywords, device=torch.device("cuda")
        )
        inputs = tuple(
            torch.empty(x.shape, device="cuda") for x in operator.inputs(requires_grad=False)
        )
        outputs = tensors(layer(*inputs))
    assert all(isinstance(y, FakeTensor) and y.device.type == "cuda" for y in outputs)


def test_distributed_tensors_work(operator: Operator, one_process_group: None) -> None:
    operator.require("distributed tensors")
    operator.require("subclass")
    layer, inputs = operator.build(), operator.inputs(requires_grad=False)
    expected = run(layer, inputs)
    mesh = DeviceMesh("cpu", [0])
    distribute_module(layer, mesh)
    outputs = tensors(layer(*(distribute_tensor(x, mesh, [Shard(0)]) for x in inputs)))
    assert all(isinstance(y, DTensor) for y in outputs)
    assert_close(
        tuple(y.full_tensor() for y in outputs), expected.outputs, operator.case, torch.float32
    )
    replicated = [distribute_tensor(x, mesh, [Replicate()]) for x in inputs]
    weighted_sum([y.full_tensor() for y in tensors(layer(*replicated))]).backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in layer.parameters())


def test_conversion_under_a_mode_or_a_default_device_is_just_conversion(
    swapped: Operator, device: torch.device
) -> None:
    with torch.device(device):
        layer = swapped.build(device)
        inputs = swapped.inputs(device)
        results = run(layer, inputs)
    assert_close(results, run_reference(swapped.case, layer, inputs), swapped.case, torch.float32)


def test_no_call_warns(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(layer, inputs)
