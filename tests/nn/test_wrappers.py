"""Converting before or after something else has wrapped, sharded or rewritten the model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import hfai
from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import (
    Operator,
    OperatorCase,
    assert_close,
    run_reference,
    tensors,
    weighted_sum,
)
from tests.nn.sharding import ignore_fsdp_warnings, shard_fsdp1, shard_fsdp2


class _Model(nn.Module):
    """One layer under test behind a parameter that hfai knows nothing of."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = layer

    def forward(self, *inputs: Tensor) -> Any:
        return self.layer(*(x * self.scale for x in inputs))


def _check(case: OperatorCase, wrapped: nn.Module, layer: nn.Module) -> None:
    """Run the wrapped model forward and backward and compare with the plain layer's formula."""
    inputs = Operator(case, "torch").inputs()
    expected = run_reference(case, layer, inputs)
    outputs = tensors(wrapped(*inputs))
    assert_close(outputs, expected.outputs, case, torch.float32)
    for x in inputs:
        x.grad = None
    weighted_sum(outputs).backward()
    assert_close(inputs[0].grad, expected.gradients["input.0"], case, torch.float32)


@pytest.mark.parametrize("first", ["convert", "wrap"])
@pytest.mark.parametrize("wrap", [DistributedDataParallel, shard_fsdp1, shard_fsdp2])
@ignore_fsdp_warnings
def test_a_parallel_model_is_converted_inside_its_wrapper(
    case: OperatorCase, wrap: Callable[[nn.Module], nn.Module], first: str, one_process_group: None
) -> None:
    plain = Operator(case, "torch").build()
    model = _Model(copy.deepcopy(plain))
    layer = model.layer
    wrapped = wrap(model) if first == "wrap" else wrap(to_hfai(model))
    if first == "wrap":
        assert to_hfai(wrapped) is wrapped
    assert type(layer) is case.hfai_class
    _check(case, wrapped, plain)
    to_torch(wrapped)
    assert type(layer) is case.torch_class
    _check(case, wrapped, plain)


@pytest.mark.needs("no layers inside")
def test_a_layer_that_was_sharded_itself_is_left_alone_with_the_reason(
    case: OperatorCase, one_process_group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    # fully_shard gives what it is called on a class of its own; what lies inside keeps its class.
    plain = Operator(case, "torch").build()
    model = _Model(copy.deepcopy(plain))
    shard_fsdp2(model.layer)
    cls = type(model.layer)
    to_hfai(model, verbose=True)
    assert type(model.layer) is cls
    assert "fully_shard came first: call to_hfai before it" in capsys.readouterr().out
    (row,) = hfai.explain(model)
    assert row.path == "torch"
    assert "fully_shard came first" in row.reason
    _check(case, model, plain)


def test_a_layer_that_was_sharded_after_the_swap_still_runs_our_class(
    case: OperatorCase, one_process_group: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = Operator(case, "torch").build()
    model = to_hfai(_Model(copy.deepcopy(plain)))
    shard_fsdp2(model.layer)
    assert isinstance(model.layer, case.hfai_class)
    _check(case, model, plain)
    to_hfai(model, verbose=True)
    assert "left" not in capsys.readouterr().out
    with pytest.warns(UserWarning, match=r"to_torch left layer \(FSDP"):
        to_torch(model)
    _check(case, model, plain)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_dynamic_quantization_leaves_the_layer_as_it_was(operator: Operator) -> None:
    operator.require("staying float under dynamic quantization")
    layer = operator.build()
    model = nn.Sequential(layer, nn.Linear(3, 3))
    quantized = torch.ao.quantization.quantize_dynamic(model)
    assert type(quantized[0]) is operator.cls
    assert type(quantized[1]) is not nn.Linear
    _check(operator.case, quantized[0], layer)


def test_a_quantized_layer_is_left_alone() -> None:
    # torch's quantized LayerNorm is a subclass of nn.LayerNorm with another forward.
    layer = nn.LayerNorm(4)
    quantized = torch.ao.nn.quantized.LayerNorm(4, layer.weight, layer.bias, 1.0, 0)
    cls = type(quantized)
    assert issubclass(cls, nn.LayerNorm)
    assert type(to_hfai(quantized)) is cls


def test_a_lazy_model_is_converted_before_it_knows_its_shapes(case: OperatorCase) -> None:
    layer = Operator(case, "torch").build()
    model = nn.Sequential(nn.Flatten(0), nn.LazyLinear(3))
    holder = nn.ModuleList([layer, model])
    to_hfai(holder)
    assert type(layer) is case.hfai_class
    model(torch.randn(5))
    assert type(model[1]) is nn.Linear
    to_torch(holder)
    assert type(layer) is case.torch_class


def test_an_exported_program_is_left_as_it_is(case: OperatorCase) -> None:
    torchs = Operator(case, "torch")
    torchs.require("export")
    layer, inputs = torchs.build(), torchs.inputs(requires_grad=False)
    module = torch.export.export(nn.Sequential(layer), inputs).module()
    to_torch(to_hfai(module))
    expected = run_reference(case, layer, inputs).outputs
    assert_close(tensors(module(*inputs)), expected, case, torch.float32)


def test_an_averaged_copy_is_converted_apart_from_its_original(case: OperatorCase) -> None:
    layer = Operator(case, "torch").build()
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(layer))
    to_hfai(layer)
    assert type(averaged.module[0]) is case.torch_class
    averaged.update_parameters(nn.Sequential(layer))
    to_hfai(averaged)
    assert type(averaged.module[0]) is case.hfai_class
    for one, other in zip(averaged.module.parameters(), layer.parameters(), strict=True):
        assert one is not other
        assert torch.equal(one, other)


def test_an_adapter_around_the_layer_finds_it_by_isinstance(case: OperatorCase) -> None:
    # What peft, weight-decay groups and initialisers do: look for torch's class and wrap or skip.
    model = to_hfai(_Model(Operator(case, "torch").build()))
    found = [name for name, m in model.named_modules() if isinstance(m, case.torch_class)]
    assert found == ["layer"]
    model.layer = nn.Sequential(model.layer, nn.Identity())
    assert type(model.layer[0]) is case.hfai_class
    assert type(to_torch(model).layer[0]) is case.torch_class


def test_a_forward_replaced_on_the_instance_goes_on_being_called(case: OperatorCase) -> None:
    layer = Operator(case, "torch").build()
    calls = []
    inner = layer.forward

    def forward(*inputs: Tensor) -> Any:
        calls.append(len(inputs))
        return inner(*inputs)

    layer.forward = forward  # type: ignore[method-assign]
    to_hfai(layer)
    _check(case, layer, layer)
    to_torch(layer)
    _check(case, layer, layer)
    assert len(calls) == 2
