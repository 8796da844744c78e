"""Copies, pickles, state dicts, and moves between dtypes and devices, with the layer swapped."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import (
    CASES,
    Operator,
    OperatorCase,
    assert_close,
    assert_same_bits,
    run,
    run_reference,
)


def _through_pickle(layer: nn.Module) -> nn.Module:
    copied: nn.Module = pickle.loads(pickle.dumps(layer))
    return copied


def _through_torch_save(layer: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    loaded: nn.Module = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.parametrize("duplicate", [copy.deepcopy, _through_pickle, _through_torch_save])
def test_a_copy_is_of_the_same_class_and_computes_the_same(
    operator: Operator, device: torch.device, duplicate: Callable[[nn.Module], nn.Module]
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    before = run(layer, inputs)
    copied = duplicate(layer)
    assert type(copied) is operator.cls
    assert_same_bits(run(copied, inputs), before)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert_same_bits(run(layer, inputs), before)


def test_calls_leave_nothing_behind_on_the_layer(operator: Operator, device: torch.device) -> None:
    layer = operator.build(device)
    before = dict(vars(layer))
    run(layer, operator.inputs(device))
    assert list(vars(layer)) == list(before)
    assert all(vars(layer)[key] is value for key, value in before.items())


def test_state_dicts_fit_strictly_both_ways(case: OperatorCase, device: torch.device) -> None:
    torchs, ours = Operator(case, "torch"), Operator(case, "hfai")
    for source, target in ((torchs, ours), (ours, torchs)):
        state = source.build(device).state_dict()
        layer = target.build(device)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.zero_()
        assert not any(layer.load_state_dict(state, strict=True))
        assert list(layer.state_dict()) == list(state)
        assert_same_bits(dict(layer.state_dict()), dict(state))
        assert layer.state_dict()._metadata == state._metadata  # type: ignore[attr-defined]


def test_load_state_dict_with_assign_puts_the_new_tensors_in_use(
    operator: Operator, device: torch.device
) -> None:
    layer, inputs = operator.build(device), operator.inputs(device)
    run(layer, inputs)
    state = {name: torch.full_like(value, 0.25) for name, value in layer.state_dict().items()}
    layer.load_state_dict(state, assign=True)
    for name, parameter in layer.named_parameters():
        assert parameter.data_ptr() == state[name].data_ptr()
    assert_close(
        run(layer, inputs),
        run_reference(operator.case, layer, inputs),
        operator.case,
        torch.float32,
    )


def test_a_missing_and_an_unexpected_key_are_reported(operator: Operator) -> None:
    layer = operator.build()
    state = dict(layer.state_dict())
    missing = next(iter(state))
    state["surplus"] = state.pop(missing)
    with pytest.raises(RuntimeError, match="Missing key") as error:
        layer.load_state_dict(state)
    assert missing in str(error.value)
    assert "surplus" in str(error.value)
    outcome = layer.load_state_dict(state, strict=False)
    assert outcome.missing_keys == [missing]
    assert outcome.unexpected_keys == ["surplus"]


def test_what_was_saved_loads_where_hfai_is_not_installed(tmp_path: Path) -> None:
    for i, case in enumerate(CASES):  # in one process, for it is the start that takes long
        layer = Operator(case, "hfai").build()
        torch.save(layer.state_dict(), tmp_path / f"{i}-state.pt")
        torch.save(to_torch(layer), tmp_path / f"{i}-model.pt")
    program = (
        "import sys; sys.modules['hfai'] = None; import torch\n"
        "for i in range(int(sys.argv[2])):\n"
        "    name = f'{sys.argv[1]}/{i}'\n"
        "    model = torch.load(name + '-model.pt', weights_only=False)\n"
        "    state = torch.load(name + '-state.pt', weights_only=True)\n"
        "    model.load_state_dict(state, strict=True)\n"
        "    print(type(model).__module__)"
    )
    command = [sys.executable, "-c", program, str(tmp_path), str(len(CASES))]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [case.torch_class.__module__ for case in CASES]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_float_type_is_right(
    operator: Operator, device: torch.device, dtype: torch.dtype
) -> None:
    layer, inputs = operator.build(device, dtype), operator.inputs(device, dtype)
    results = run(layer, inputs)
    assert {y.dtype for y in results.outputs} == {dtype}
    assert_close(results, run_reference(operator.case, layer, inputs), operator.case, dtype)


@pytest.mark.parametrize("move", ["half", "bfloat16", "double", "to", "type"])
def test_a_layer_moved_to_another_type_after_a_call_computes_in_that_type(
    operator: Operator, device: torch.device, move: str
) -> None:
    layer = operator.build(device)
    run(layer, operator.inputs(device))
    dtype = {"half": torch.float16, "double": torch.float64}.get(move, torch.bfloat16)
    moved = getattr(layer, move)(*((dtype,) if move in ("to", "type") else ()))
    assert moved is layer
    inputs = operator.inputs(device, dtype)
    results = run(layer, inputs)
    assert {y.dtype for y in results.outputs} == {dtype}
    assert_close(results, run_reference(operator.case, layer, inputs), operator.case, dtype)


def test_a_layer_built_on_meta_is_converted_and_materialised(
    case: OperatorCase, device: torch.device
) -> None:
    Operator(case, "torch").require("a single output")
    Operator(case, "torch").require("reset_parameters")
    layer = case.torch_class(*case.arguments, **case.keywords, device="meta")
    assert type(to_hfai(layer)) is case.hfai_class
    inputs = tuple(x.to("meta") for x in Operator(case, "hfai").inputs())
    outputs = layer(*inputs)
    assert outputs.is_meta
    assert outputs.shape == Operator(case, "torch").build()(*Operator(case, "torch").inputs()).shape
    layer.to_empty(device=device)
    layer.reset_parameters()
    fresh = case.torch_class(*case.arguments, **case.keywords, device=device)
    assert_same_bits(dict(layer.state_dict()), dict(fresh.state_dict()))
    assert type(layer) is case.hfai_class


def test_skip_init_and_device_and_dtype_arguments_work(
    case: OperatorCase, device: torch.device
) -> None:
    Operator(case, "torch").require("a device argument in its signature")
    for build in (case.hfai_class, lambda *a, **k: nn.utils.skip_init(case.hfai_class, *a, **k)):
        layer = build(*case.arguments, **case.keywords, device=device, dtype=torch.bfloat16)
        assert type(layer) is case.hfai_class
        assert {(p.device.type, p.dtype) for p in layer.parameters()} == {
            (device.type, torch.bfloat16)
        }


def test_parameters_can_be_put_into_shared_memory(operator: Operator) -> None:
    layer, inputs = operator.build(), operator.inputs()
    before = run(layer, inputs)
    assert layer.share_memory() is layer
    assert all(parameter.is_shared() for parameter in layer.parameters())
    assert_same_bits(run(layer, inputs), before)


def test_eval_train_and_requires_grad_reach_the_layer(operator: Operator) -> None:
    layer = operator.build()
    model = nn.Sequential(layer)
    assert not model.eval()[0].training
    assert model.train()[0].training
    model.requires_grad_(False)
    assert not any(parameter.requires_grad for parameter in layer.parameters())
