"""Derivatives of derivatives, forward mode, and torch.func's transforms, against float64."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from tests.nn.operator_cases import (
    Operator,
    assert_close,
    cotangents,
    reference_module,
    tensors,
    weighted_sum,
)

pytestmark = pytest.mark.filterwarnings(
    # torch scripts its own decompositions for forward mode.
    "ignore:`torch.jit.*` is deprecated:DeprecationWarning"
)


def _both(
    operator: Operator, device: torch.device
) -> Iterator[tuple[nn.Module, Callable[..., Any], torch.device, torch.dtype]]:
    """Yield the layer on `device` in float32, then the formula on the CPU in float64."""
    layer = operator.build(device)
    yield layer, layer, device, torch.float32
    double = reference_module(operator.case, layer)
    call = functools.partial(operator.case.reference, double)
    yield double, call, torch.device("cpu"), torch.float64


def _loose(operator: Operator, actual: Any, expected: Any) -> None:
    """Compare higher derivatives: they cancel more, so a little more slack than `assert_close`."""
    for one, other in zip(tensors(actual), tensors(expected), strict=True):
        scale = other.abs().max().item() if other.numel() else 0.0
        rtol, atol = operator.case.tolerances[torch.float32]
        torch.testing.assert_close(
            one.detach().double().cpu(), other.detach(), rtol=5 * rtol, atol=5 * atol * (1 + scale)
        )


def _penalty(call: Callable[..., Any], inputs: tuple[Tensor, ...]) -> Tensor:
    """Return WGAN-GP's term: the squared norm of the gradient with respect to the inputs."""
    gradients = torch.autograd.grad(weighted_sum(call(*inputs)), inputs, create_graph=True)
    return torch.stack([g.square().sum() for g in gradients]).sum()


def test_double_backward_matches_float64(operator: Operator, device: torch.device) -> None:
    operator.require("double backward")
    results = []
    for module, call, where, dtype in _both(operator, device):
        inputs = operator.inputs(where, dtype)
        leaves = [*inputs, *module.parameters()]
        penalty = _penalty(call, inputs)
        results.append(
            torch.autograd.grad(penalty, leaves, allow_unused=True, materialize_grads=True)
        )
    _loose(operator, *results)


def test_double_backward_reaches_the_incoming_gradient(
    operator: Operator, device: torch.device
) -> None:
    operator.require("double backward")
    results = []
    for _, call, where, dtype in _both(operator, device):
        inputs = operator.inputs(where, dtype)
        outputs = tensors(call(*inputs))
        grads = tuple(g.requires_grad_() for g in cotangents(outputs))
        first = torch.autograd.grad(outputs, inputs, grads, create_graph=True)
        results.append(torch.autograd.grad(weighted_sum(first), grads))
    _loose(operator, *results)


def test_create_graph_without_a_second_backward_costs_no_accuracy(
    operator: Operator, device: torch.device
) -> None:
    operator.require("double backward")
    layer, inputs = operator.build(device), operator.inputs(device)
    plain = torch.autograd.grad(weighted_sum(layer(*inputs)), inputs)
    graphed = torch.autograd.grad(weighted_sum(layer(*inputs)), inputs, create_graph=True)
    assert all(g.requires_grad for g in graphed)
    assert_close(graphed, plain, operator.case, torch.float32)


def test_gradcheck_and_gradgradcheck_pass_in_double(
    operator: Operator, device: torch.device
) -> None:
    operator.require("a single output")
    operator.require("double backward")
    layer = operator.build(device, torch.float64)
    inputs = tuple(
        x[:2].detach().clone().requires_grad_() for x in operator.inputs(device, torch.float64)
    )
    assert torch.autograd.gradcheck(layer, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(layer, inputs, fast_mode=True)


def test_forward_mode_tangents_match_float64(operator: Operator, device: torch.device) -> None:
    operator.require("forward mode")
    results = []
    for _, call, where, dtype in _both(operator, device):
        inputs = operator.inputs(where, dtype, requires_grad=False)
        directions = operator.inputs(where, dtype, requires_grad=False, seed=9)
        with forward_ad.dual_level():
            duals = [forward_ad.make_dual(x, d) for x, d in zip(inputs, directions, strict=True)]
            outputs = [forward_ad.unpack_dual(y) for y in tensors(call(*duals))]
            results.append([(y.primal, y.tangent) for y in outputs])
    _loose(operator, *results)


def test_torch_func_jvp_matches_float64(operator: Operator, device: torch.device) -> None:
    operator.require("forward mode")
    results = []
    for _, call, where, dtype in _both(operator, device):
        inputs = operator.inputs(where, dtype, requires_grad=False)
        directions = operator.inputs(where, dtype, requires_grad=False, seed=9)
        results.append(torch.func.jvp(call, inputs, directions))
    _loose(operator, *results)


def test_forward_mode_reaches_the_parameters(operator: Operator, device: torch.device) -> None:
    operator.require("forward mode")
    results = []
    for module, _, where, dtype in _both(operator, device):
        inputs = operator.inputs(where, dtype, requires_grad=False)
        with forward_ad.dual_level():
            duals = {
                name: forward_ad.make_dual(parameter.detach(), torch.full_like(parameter, 0.5))
                for name, parameter in module.named_parameters()
            }
            outputs = torch.func.functional_call(module, duals, inputs)
            results.append([forward_ad.unpack_dual(y).tangent for y in tensors(outputs)])
    _loose(operator, *results)


def test_vmap_over_the_batch_equals_the_batched_call(
    operator: Operator, device: torch.device
) -> None:
    operator.require("vmap")
    layer, inputs = operator.build(device), operator.inputs(device, requires_grad=False)
    mapped = torch.func.vmap(layer)(*(x.unsqueeze(1) for x in inputs))
    for y, z in zip(tensors(layer(*inputs)), tensors(mapped), strict=True):
        assert_close(z.squeeze(1), y, operator.case, torch.float32)


def test_a_batch_of_incoming_gradients_goes_back_in_one_call(
    operator: Operator, device: torch.device
) -> None:
    operator.require("vmap")
    layer, inputs = operator.build(device), operator.inputs(device)
    leaves = [*inputs, *layer.parameters()]
    outputs = tensors(layer(*inputs))
    grads = cotangents(outputs)
    batch = tuple(torch.stack([g, 2 * g, g.flip(0)]) for g in grads)
    together = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True, retain_graph=True)
    for index in range(3):
        alone = torch.autograd.grad(outputs, leaves, [b[index] for b in batch], retain_graph=True)
        assert_close([t[index] for t in together], list(alone), operator.case, torch.float32)


def test_vmap_over_an_ensemble_of_layers_uses_each_ones_weights(
    operator: Operator, device: torch.device
) -> None:
    operator.require("vmap")
    layers = [operator.build(device) for _ in range(3)]
    for factor, layer in enumerate(layers, start=1):
        for parameter in layer.parameters():
            parameter.data.mul_(factor)
    inputs = operator.inputs(device, requires_grad=False)
    parameters, buffers = torch.func.stack_module_state(layers)
    together = torch.func.vmap(
        lambda p, b: torch.func.functional_call(layers[0], (p, b), inputs), randomness="error"
    )(parameters, buffers)
    for index, layer in enumerate(layers):
        for y, z in zip(tensors(layer(*inputs)), tensors(together), strict=True):
            assert_close(z[index], y, operator.case, torch.float32)


def test_per_sample_gradients_equal_gradients_of_single_samples(
    operator: Operator, device: torch.device
) -> None:
    operator.require("vmap")
    layer, inputs = operator.build(device), operator.inputs(device, requires_grad=False)
    parameters = {name: p.detach() for name, p in layer.named_parameters()}

    def loss(given: dict[str, Tensor], *sample: Tensor) -> Tensor:
        batched = (x.unsqueeze(0) for x in sample)
        outputs = tensors(torch.func.functional_call(layer, given, tuple(batched)))
        return torch.stack([y.square().sum() for y in outputs]).sum()

    in_dims = (None, *(0 for _ in inputs))
    together = torch.func.vmap(torch.func.grad(loss), in_dims=in_dims)(parameters, *inputs)
    for index in range(inputs[0].shape[0]):
        alone = torch.func.grad(loss)(parameters, *(x[index] for x in inputs))
        for name, gradient in alone.items():
            assert_close(together[name][index], gradient, operator.case, torch.float32)


@pytest.mark.parametrize("transform", [torch.func.jacrev, torch.func.jacfwd, torch.func.hessian])
def test_jacobians_and_hessians_match_float64(
    operator: Operator, device: torch.device, transform: Callable[..., Any]
) -> None:
    operator.require("vmap")
    operator.require("forward mode")
    results = []
    for _, function, where, dtype in _both(operator, device):
        inputs = tuple(x[:1] for x in operator.inputs(where, dtype, requires_grad=False))
        if transform is torch.func.hessian:
            results.append(transform(lambda *xs, f=function: weighted_sum(f(*xs)))(*inputs))
        else:
            results.append(transform(lambda *xs, f=function: tensors(f(*xs))[0])(*inputs))
    _loose(operator, *results)
