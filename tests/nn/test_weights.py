"""Each call reads the weights the layer has at that moment, whatever put them there."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import (
    Operator,
    OperatorCase,
    assert_close,
    assert_same_bits,
    reference_module,
    run,
    run_reference,
    tensors,
    weighted_sum,
)


class _Halved(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight / 2


def _first(layer: nn.Module) -> str:
    return next(name for name, _ in layer.named_parameters())


def test_an_update_in_place_counts_in_the_next_call(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    for factor in (1.0, 2.0, 0.5):
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(factor)
        expected = run_reference(operator.case, layer, inputs)
        assert_close(run(layer, inputs), expected, operator.case, torch.float32)


def test_data_swapped_under_a_parameter_counts_in_the_next_call(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    run(layer, inputs)
    for parameter in layer.parameters():
        parameter.data = parameter.data * 2
    expected = run_reference(operator.case, layer, inputs)
    assert_close(run(layer, inputs), expected, operator.case, torch.float32)


@pytest.mark.needs("parameters of its own")
def test_a_parameter_that_is_replaced_gets_the_gradient(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    name = _first(layer)
    run(layer, inputs)
    old = getattr(layer, name)
    old.grad = None
    replacement = nn.Parameter(old.detach() * 2)
    setattr(layer, name, replacement)
    assert_close(
        run(layer, inputs),
        run_reference(operator.case, layer, inputs),
        operator.case,
        torch.float32,
    )
    assert old.grad is None
    assert replacement.grad is not None


@pytest.mark.needs("parameters of its own")
def test_a_weight_of_odd_layout_is_read_right(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    name = _first(layer)
    shape = getattr(layer, name).shape
    spaced = torch.randn(*shape[:-1], 2 * shape[-1], device=device)[..., ::2]
    expanded = torch.randn((), device=device).expand(shape)
    misaligned = torch.randn(shape.numel() + 1, device=device)[1:].view(shape)
    negated = torch._neg_view(torch.randn(shape, device=device))  # the sign is a bit elsewhere
    for weight in (spaced, expanded, misaligned, negated):
        setattr(layer, name, nn.Parameter(weight))
        assert_close(
            run(layer, inputs),
            run_reference(operator.case, layer, inputs),
            operator.case,
            torch.float32,
        )


def test_functional_call_uses_the_tensors_it_is_given(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    run(layer, inputs)
    given = {
        name: (parameter.detach() * 3).requires_grad_()
        for name, parameter in layer.named_parameters()
    }
    results = run(lambda *xs: torch.func.functional_call(layer, given, xs), inputs, given)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.mul_(3)
    layer.zero_grad()
    expected = run_reference(operator.case, layer, inputs)
    assert_close(results, expected, operator.case, torch.float32)
    assert all(parameter.grad is None for parameter in layer.parameters())


def test_functional_call_reaches_every_place_of_a_shared_layer(
    operator: Operator, device: torch.device
) -> None:
    operator.require("functional calls of a shared layer")
    layer, inputs = operator.build(device), operator.inputs(device)
    model = nn.ModuleDict({"a": layer, "b": layer})
    model.forward = lambda *xs: (  # type: ignore[method-assign]
        tensors(model["a"](*xs)),
        tensors(model["b"](*xs)),
    )
    given = {name: parameter.detach() * 3 for name, parameter in model.named_parameters()}
    tripled = operator.build(device)
    for parameter in tripled.parameters():
        parameter.data.mul_(3)
    # torch 2.13 leaves the given tensors behind on a shared layer: ask nothing of it afterwards.
    a, b = torch.func.functional_call(model, given, inputs)
    assert_same_bits(a, b)
    assert_same_bits(a, tensors(tripled(*inputs)))


@pytest.mark.needs("parameters of its own")
def test_a_parametrization_registered_on_the_layer_is_followed(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    name = _first(layer)
    halved = operator.build(device)
    getattr(halved, name).data.div_(2)
    expected = run_reference(operator.case, halved, inputs)
    parametrize.register_parametrization(layer, name, _Halved())
    results = run(layer, inputs)
    assert_close(results.outputs, expected.outputs, operator.case, torch.float32)
    gradient = results.gradients[f"parametrizations.{name}.original"]
    assert_close(gradient, expected.gradients[name] / 2, operator.case, torch.float32)
    parametrize.remove_parametrizations(layer, name)
    assert type(layer) is operator.cls


@pytest.mark.needs("parameters of its own")
def test_to_torch_names_a_layer_that_was_parametrized_after_the_swap(swapped: Operator) -> None:
    layer = swapped.build()
    name = _first(layer)
    parametrize.register_parametrization(layer, name, _Halved())
    with pytest.warns(UserWarning, match="to_torch left the model itself"):
        to_torch(layer)
    parametrize.remove_parametrizations(layer, name)
    assert type(to_torch(layer)) is swapped.case.torch_class


@pytest.mark.needs("parameters of its own")
def test_a_layer_that_is_parametrized_already_is_left_alone(
    case: OperatorCase, capsys: pytest.CaptureFixture[str]
) -> None:
    layer = Operator(case, "torch").build()
    parametrize.register_parametrization(layer, _first(layer), _Halved())
    cls = type(layer)
    to_hfai(layer, verbose=True)
    assert type(layer) is cls
    assert "has a parametrization: call to_hfai before" in capsys.readouterr().out


@pytest.mark.parametrize("when", ["before the swap", "after the swap"])
@pytest.mark.needs("parameters of its own")
def test_the_old_weight_norm_works(operator: Operator, device: torch.device, when: str) -> None:
    torchs = Operator(operator.case, "torch")
    layer = (torchs if when == "before the swap" else operator).build(device)
    inputs = operator.inputs(device)
    name = _first(layer)
    plain = run(operator.build(device), inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        nn.utils.weight_norm(layer, name)
    if operator.flavour == "hfai":
        to_hfai(layer)
    assert type(layer) is operator.cls
    results = run(layer, inputs)
    assert_close(results.outputs, plain.outputs, operator.case, torch.float32)
    with torch.no_grad():
        getattr(layer, f"{name}_g").mul_(2)
    doubled = reference_module(operator.case, operator.build(device))
    getattr(doubled, name).data.mul_(2)
    expected = run_reference(operator.case, doubled, inputs)
    results = run(layer, inputs)
    assert_close(results.outputs, expected.outputs, operator.case, torch.float32)
    for part in (f"{name}_g", f"{name}_v"):
        assert part in layer.state_dict()
        assert results.gradients[part] is not None


@pytest.mark.parametrize("when", ["before the swap", "after the swap"])
@pytest.mark.needs("parameters of its own")
def test_pruning_works(operator: Operator, device: torch.device, when: str) -> None:
    torchs = Operator(operator.case, "torch")
    layer = (torchs if when == "before the swap" else operator).build(device)
    inputs = operator.inputs(device)
    name = _first(layer)
    prune.l1_unstructured(layer, name, amount=0.5)
    if operator.flavour == "hfai":
        to_hfai(layer)
    assert type(layer) is operator.cls
    results = run(layer, inputs)
    mask = getattr(layer, f"{name}_mask")
    pruned = operator.build(device)
    getattr(pruned, name).data.mul_(mask)
    expected = run_reference(operator.case, pruned, inputs)
    assert_close(results.outputs, expected.outputs, operator.case, torch.float32)
    gradient = results.gradients[f"{name}_orig"]
    assert_close(gradient, expected.gradients[name] * mask.cpu(), operator.case, torch.float32)
    prune.remove(layer, name)
    assert sorted(layer.state_dict()) == sorted(pruned.state_dict())


def test_one_layer_called_twice_gathers_both_gradients(
    operator: Operator, device: torch.device
) -> None:
    layer = operator.build(device)
    first, second = operator.inputs(device, seed=4), operator.inputs(device, seed=5)
    separate = [run(layer, inputs).gradients for inputs in (first, second)]
    layer.zero_grad()
    (weighted_sum(layer(*first)) + weighted_sum(layer(*second))).backward()
    for name, parameter in layer.named_parameters():
        both = separate[0][name] + separate[1][name]
        torch.testing.assert_close(parameter.grad, both)
