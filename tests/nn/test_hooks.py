"""Hooks registered before or after the swap fire with the arguments they always had."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import Operator, assert_same_bits, run, tensors, weighted_sum


@pytest.fixture(params=["before the swap", "after the swap"])
def layer_and_swap(
    operator: Operator, device: torch.device, request: pytest.FixtureRequest
) -> tuple[nn.Module, Any]:
    """A layer to register hooks on, and what is then done to it."""
    if operator.flavour == "torch" or request.param == "after the swap":
        return operator.build(device), lambda layer: layer
    return Operator(operator.case, "torch").build(device), to_hfai


def test_forward_hooks_see_the_inputs_and_may_replace_inputs_and_outputs(
    layer_and_swap: tuple[nn.Module, Any], operator: Operator, device: torch.device
) -> None:
    layer, swap = layer_and_swap
    seen: dict[str, Any] = {}
    plain = operator.build(device)
    inputs = operator.inputs(device)

    def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        seen["before"] = (module, args, kwargs)
        return (args[0] * 2, *args[1:]), kwargs

    def after(module: nn.Module, args: tuple[Any, ...], outputs: Any) -> Any:
        seen["after"] = (module, outputs)
        return tensors(outputs)[0] + 1

    layer.register_forward_pre_hook(before, with_kwargs=True)
    handle = layer.register_forward_hook(after)
    swap(layer)
    result = layer(*inputs)
    assert seen["before"][0] is layer
    assert all(one is other for one, other in zip(seen["before"][1], inputs, strict=True))
    assert seen["before"][2] == {}
    assert seen["after"][0] is layer
    expected = tensors(plain(inputs[0] * 2, *inputs[1:]))[0]
    torch.testing.assert_close(result, expected + 1)
    handle.remove()
    torch.testing.assert_close(tensors(layer(*inputs))[0], expected)


def test_backward_hooks_see_the_gradients_and_may_replace_them(
    layer_and_swap: tuple[nn.Module, Any], operator: Operator, device: torch.device
) -> None:
    operator.require("a single output")
    layer, swap = layer_and_swap
    plain = run(operator.build(device), operator.inputs(device))
    seen: dict[str, tuple[Tensor, ...]] = {}

    def before(module: nn.Module, grad_outputs: tuple[Tensor, ...]) -> None:
        seen["outputs"] = grad_outputs

    def after(module: nn.Module, grad_inputs: Any, grad_outputs: Any) -> Any:
        seen["inputs"] = grad_inputs
        return tuple(grad * 3 for grad in grad_inputs)

    layer.register_full_backward_pre_hook(before)
    layer.register_full_backward_hook(after)
    swap(layer)
    inputs = operator.inputs(device)
    outputs = tensors(layer(*inputs))
    weighted_sum(outputs).backward()
    assert len(seen["outputs"]) == len(outputs)
    assert_same_bits(seen["inputs"][0], plain.gradients["input.0"])
    assert_same_bits(inputs[0].grad, plain.gradients["input.0"] * 3)


def test_state_dict_hooks_still_fire(
    layer_and_swap: tuple[nn.Module, Any], operator: Operator
) -> None:
    layer, swap = layer_and_swap
    calls = []
    layer.register_state_dict_pre_hook(lambda *args: calls.append("saving"))
    layer.register_state_dict_post_hook(lambda *args: calls.append("saved"))
    layer.register_load_state_dict_pre_hook(lambda *args: calls.append("loading"))
    layer.register_load_state_dict_post_hook(lambda *args: calls.append("loaded"))
    swap(layer)
    layer.load_state_dict(layer.state_dict())
    assert calls == ["saving", "saved", "loading", "loaded"]


def test_a_tensor_hook_on_the_output_and_on_a_parameter_fires(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    parameter = next(layer.parameters())
    plain = run(layer, inputs).gradients
    parameter.grad = None
    parameter.register_hook(lambda grad: grad * 2)
    outputs = tensors(layer(*inputs))
    fired = []
    for output in outputs:
        output.register_hook(fired.append)
    weighted_sum(outputs).backward()
    assert len(fired) == len(outputs)
    name = next(name for name, p in layer.named_parameters() if p is parameter)
    assert_same_bits(parameter.grad, plain[name] * 2)


def test_hooks_outlive_the_way_back(operator: Operator, device: torch.device) -> None:
    layer = operator.build(device)
    calls = []
    layer.register_forward_hook(lambda *args: calls.append("called"))
    to_torch(to_hfai(layer))(*operator.inputs(device))
    assert calls == ["called"]
