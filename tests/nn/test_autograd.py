"""First-order gradients: which are asked for, how they arrive, and what autograd keeps for them."""

from __future__ import annotations

import itertools
import threading

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.nn.operator_cases import (
    Operator,
    assert_close,
    assert_same_bits,
    cotangents,
    run,
    run_reference,
    tensors,
    weighted_sum,
)


def test_every_choice_of_what_requires_grad_gets_just_those_gradients(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    expected = run_reference(operator.case, layer, inputs)
    leaves = [*inputs, *layer.parameters()]
    # All choices for a handful of leaves; for more, each leaf alone, all but one, none, all.
    counts = range(len(leaves) + 1) if len(leaves) <= 4 else (0, 1, len(leaves) - 1, len(leaves))
    choices = [c for n in counts for c in itertools.combinations(range(len(leaves)), n)]
    for choice in choices:
        for index, leaf in enumerate(leaves):
            leaf.requires_grad_(index in choice)
        results = run(layer, inputs)
        assert_close(results.outputs, expected.outputs, operator.case, torch.float32)
        for index, (name, gradient) in enumerate(results.gradients.items()):
            if index in choice:
                assert_close(gradient, expected.gradients[name], operator.case, torch.float32)
            else:
                assert gradient is None, f"{name} got a gradient with {choice} asked for"
        outputs = tensors(layer(*inputs))
        if "outputs that hang on every parameter" in operator.case.unsupported:
            outputs = outputs[:1]
        assert all(y.requires_grad == bool(choice) for y in outputs)


def test_torch_autograd_grad_returns_gradients_and_sets_none(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    expected = run(layer, inputs).gradients
    layer.zero_grad()
    parameters = dict(layer.named_parameters())
    outputs = tensors(layer(*inputs))
    gradients = torch.autograd.grad(outputs, list(parameters.values()), cotangents(outputs))
    for name, gradient in zip(parameters, gradients, strict=True):
        assert_same_bits(gradient, expected[name])
    assert all(parameter.grad is None for parameter in parameters.values())


def test_gradients_accumulate(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    once = run(layer, inputs).gradients
    outputs = tensors(layer(*inputs))
    torch.autograd.backward(outputs, cotangents(outputs))
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter.grad, once[name] * 2)


@pytest.mark.parametrize("kind", ["expanded", "strided", "transposed"])
def test_gradients_of_any_layout_are_accepted(
    operator: Operator, device: torch.device, kind: str
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    outputs = tensors(layer(*inputs))
    grads = []
    for y in outputs:
        if kind == "expanded":  # what sum().backward() sends
            grads.append(torch.full((), 0.7, device=device).expand(y.shape))
        elif kind == "strided":
            grads.append(torch.randn(*y.shape, 2, device=device)[..., 0])
        else:
            grads.append(torch.randn(y.shape[::-1], device=device).permute(*range(y.ndim)[::-1]))
    strided = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
    dense = torch.autograd.grad(outputs, inputs, [g.clone().contiguous() for g in grads])
    assert_close(strided, dense, operator.case, torch.float32)


@pytest.mark.parametrize("kind", ["strided", "transposed", "expanded", "misaligned", "negated"])
def test_inputs_of_any_layout_give_the_values_of_dense_ones(
    operator: Operator, device: torch.device, kind: str
) -> None:
    layer = operator.build(device)

    def relayout(x: Tensor) -> Tensor:
        if kind == "strided":
            return torch.stack([x, x.roll(1)], dim=-1)[..., 0]
        if kind == "transposed":
            order = list(range(x.ndim))[::-1]
            return x.permute(order).contiguous().permute(order)
        if kind == "expanded":
            return x[:1].expand(x.shape)
        if kind == "misaligned":
            return torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape)
        return torch._neg_view(-x)  # plain memory whose sign is kept in a bit of the tensor

    inputs = operator.inputs(device, requires_grad=False)
    laid_out = tuple(relayout(x).requires_grad_() for x in inputs)
    dense = tuple(x.detach().clone().contiguous().requires_grad_() for x in laid_out)
    results, expected = run(layer, laid_out), run(layer, dense)
    assert_close(results, expected, operator.case, torch.float32)


def test_gradients_whose_sign_is_a_bit_are_read_right(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    outputs = tensors(layer(*inputs))
    grads = cotangents(outputs)
    plain = torch.autograd.grad(outputs, inputs, grads, retain_graph=True)
    negated = torch.autograd.grad(outputs, inputs, [torch._neg_view(-g) for g in grads])
    assert_same_bits(negated, plain)


def test_an_input_changed_in_place_before_backward_is_an_error(
    operator: Operator, device: torch.device
) -> None:
    operator.require("saving the input itself")
    layer = operator.build(device)
    inputs = tuple(x * 1 for x in operator.inputs(device))
    outputs = tensors(layer(*inputs))
    inputs[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        weighted_sum(outputs).backward()


def test_a_weight_changed_in_place_before_backward_is_an_error(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    outputs = tensors(layer(*inputs))
    with torch.no_grad():
        next(layer.parameters()).add_(1)
    with pytest.raises(RuntimeError, match=r"modified (by an )?inplace"):
        weighted_sum(outputs).backward()


def test_a_second_backward_needs_retain_graph(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    loss = weighted_sum(layer(*inputs))
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert_same_bits(torch.autograd.grad(loss, inputs), first)
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, inputs)


def test_outputs_may_be_changed_in_place(operator: Operator, device: torch.device) -> None:
    operator.require("changing outputs in place")
    layer, inputs = operator.build(device), operator.inputs(device)
    expected = torch.autograd.grad(weighted_sum(layer(*inputs)), inputs)
    changed = [y.add_(1) for y in tensors(layer(*inputs))]
    assert_same_bits(torch.autograd.grad(weighted_sum(changed), inputs), expected)


def test_saved_tensor_hooks_see_everything_that_is_kept(
    operator: Operator, device: torch.device
) -> None:
    operator.require("saving the input itself")
    layer, leaves = operator.build(device), operator.inputs(device)
    plain = run(layer, leaves).gradients
    packed: list[np.ndarray] = []

    def pack(tensor: Tensor) -> tuple[int, torch.dtype, torch.device]:
        packed.append(tensor.detach().double().cpu().numpy().copy())
        return len(packed) - 1, tensor.dtype, tensor.device

    def unpack(handle: tuple[int, torch.dtype, torch.device]) -> Tensor:
        index, dtype, where = handle
        return torch.from_numpy(packed[index]).to(where, dtype)

    inputs = tuple(x.clone() for x in leaves)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        outputs = tensors(layer(*inputs))
    assert any(
        array.shape == inputs[0].shape and np.array_equal(array, inputs[0].detach().cpu().numpy())
        for array in packed
    )
    # Whoever offloads saved tensors gives their memory away: backward must not look there.
    for x in inputs:
        x.data.fill_(float("nan"))
    leaf_gradients = torch.autograd.grad(outputs, leaves, cotangents(outputs), retain_graph=True)
    assert_same_bits(leaf_gradients, tuple(plain[f"input.{i}"] for i in range(len(leaves))))
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(outputs, list(parameters.values()), cotangents(outputs))
    for name, gradient in zip(parameters, gradients, strict=True):
        assert_same_bits(gradient, plain[name])


def test_saved_tensors_can_wait_on_the_cpu(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    plain = run(layer, inputs)
    with torch.autograd.graph.save_on_cpu():
        offloaded = run(layer, inputs)
    assert_same_bits(offloaded, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nothing_is_kept_where_no_gradient_will_be_asked_for(
    operator: Operator, device: torch.device, mode: type
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    expected = run(layer, inputs).outputs
    packed: list[Tensor] = []
    with mode(), torch.autograd.graph.saved_tensors_hooks(packed.append, lambda handle: handle):
        outputs = tensors(layer(*inputs))
    assert not packed
    assert not any(y.requires_grad for y in outputs)
    assert all(y.is_inference() == (mode is torch.inference_mode) for y in outputs)
    assert_same_bits(outputs, expected)


def test_nothing_is_kept_where_nothing_requires_grad(
    operator: Operator, device: torch.device
) -> None:
    layer = operator.build(device).requires_grad_(False)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(packed.append, lambda handle: handle):
        outputs = tensors(layer(*operator.inputs(device, requires_grad=False)))
    assert not packed
    assert not any(y.requires_grad for y in outputs)


def test_an_inference_tensor_is_refused_in_words_or_gives_right_gradients(
    operator: Operator, device: torch.device
) -> None:
    layer = operator.build(device)
    with torch.inference_mode():
        inputs = operator.inputs(device, requires_grad=False)
    expected = run_reference(operator.case, layer, tuple(x.clone() for x in inputs))
    outputs, refusal = None, ""
    try:
        outputs = tensors(layer(*inputs))
    except RuntimeError as error:
        refusal = str(error)
    if outputs is None:
        assert "Inference tensors cannot be saved for backward" in refusal
    else:
        torch.autograd.backward(outputs, cotangents(outputs))
        for name, parameter in layer.named_parameters():
            gradient = expected.gradients[name]
            assert_close(parameter.grad, gradient, operator.case, torch.float32)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_activation_checkpointing_is_bit_identical(
    operator: Operator, device: torch.device, use_reentrant: bool
) -> None:
    if use_reentrant:
        operator.require("a single output")
    layer, inputs = operator.build(device), operator.inputs(device)
    plain = run(layer, inputs)
    checkpointed = run(
        lambda *xs: checkpoint(layer, *xs, use_reentrant=use_reentrant),
        inputs,
        layer.named_parameters(),
    )
    assert_same_bits(checkpointed, plain)


def test_backward_from_another_thread_gives_the_same_bits(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    plain = run(layer, inputs).gradients
    results: list[Tensor] = []
    loss = weighted_sum(layer(*inputs))
    thread = threading.Thread(target=lambda: results.extend(torch.autograd.grad(loss, inputs)))
    thread.start()
    thread.join()
    assert_same_bits(results, [plain[f"input.{i}"] for i in range(len(inputs))])


def test_threads_share_a_layer(operator: Operator, device: torch.device) -> None:
    layer = operator.build(device)
    expected = [run(layer, operator.inputs(device, seed=seed)).outputs for seed in range(4)]
    results: dict[int, list[tuple[Tensor, ...]]] = {seed: [] for seed in range(4)}

    def work(seed: int) -> None:
        inputs = operator.inputs(device, seed=seed)
        for _ in range(5):
            outputs = tensors(layer(*inputs))
            torch.autograd.grad(weighted_sum(outputs), inputs)
            results[seed].append(outputs)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed in range(4):
        assert len(results[seed]) == 5
        for outputs in results[seed]:
            found = tuple(y.detach() for y in outputs)
            if device.type == "cuda":
                assert_same_bits(found, expected[seed])
            else:  # its matrix products round as they are cut among threads, torch's class too
                torch.testing.assert_close(found, expected[seed])


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.filterwarnings("ignore:Error detected in")
def test_anomaly_detection_finds_the_forward_call(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    with torch.autograd.detect_anomaly(check_nan=True):
        outputs = tensors(layer(*inputs))
        with pytest.raises(RuntimeError, match="returned nan values"):
            torch.autograd.backward(outputs, [torch.full_like(y, float("nan")) for y in outputs])


def test_outputs_are_no_views_of_inputs(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    for y in tensors(layer(*inputs)):
        assert y._base is None or all(y._base is not x for x in inputs)
        storages = {x.untyped_storage().data_ptr() for x in inputs}
        assert y.untyped_storage().data_ptr() not in storages


def test_the_layer_works_at_any_place_of_a_graph(operator: Operator, device: torch.device) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    before = nn.Parameter(torch.ones((), device=device))
    after = nn.Parameter(torch.ones((), device=device))
    outputs = tensors(layer(*(x * before for x in inputs)))
    loss = weighted_sum([y * after for y in outputs])
    loss.backward()
    assert_close(after.grad, loss.detach(), operator.case, torch.float32)
    assert before.grad is not None
    assert torch.isfinite(before.grad)
