"""The recurrent benchmarks: torch passes its own check, ours takes part, work is counted once."""

from __future__ import annotations

import pytest
import torch
from benchmarks.harness.check import relative_errors
from benchmarks.operators import OPERATORS
from benchmarks.operators.cell import cell_case
from benchmarks.operators.recurrent import recurrent_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["lstm", "gru", "rnn"])
def test_torch_and_ours_agree_with_the_float64_reference(name: str) -> None:
    operator = OPERATORS[name]()
    case = recurrent_case(5, 3, 7, torch.float32, ieee=True, layers=2, directions=2)
    inputs = operator.inputs(case, CPU, torch.Generator().manual_seed(1))
    names = []
    for implementation in operator.implementations(case, CPU, grid=False):
        y = implementation.bind(inputs)()
        gradients = torch.autograd.grad(y, list(inputs.leaves.values()), inputs.grad_output)
        outputs = {"y": y.detach()}
        outputs |= {f"d{leaf}": g for leaf, g in zip(inputs.leaves, gradients, strict=True)}
        errors = relative_errors(outputs, operator.reference(case, inputs, sample=False))
        assert errors.keys() == outputs.keys()
        assert max(errors.values()) < 1e-6
        names.append(implementation.name)
    assert names[:2] == ["torch", "hfai"]


@pytest.mark.parametrize("name", ["lstm_cell", "gru_cell"])
def test_a_steps_states_and_gradients_agree_with_the_float64_reference(name: str) -> None:
    operator = OPERATORS[name]()
    case = cell_case(3, 8, torch.float32)
    inputs = operator.inputs(case, CPU, torch.Generator().manual_seed(1))
    assert {"x", "h", "weight_hh"} <= set(inputs.leaves)
    for implementation in operator.implementations(case, CPU, grid=False):
        y = implementation.bind(inputs)()
        gradients = torch.autograd.grad(y, list(inputs.leaves.values()), inputs.grad_output)
        outputs = {"y": y.detach()}
        outputs |= {f"d{leaf}": g for leaf, g in zip(inputs.leaves, gradients, strict=True)}
        errors = relative_errors(outputs, operator.reference(case, inputs, sample=False))
        assert max(errors.values()) < 1e-6


def test_the_published_cases_are_those_that_were_promised() -> None:
    named = {name: [case.name for case in OPERATORS[name]().cases()] for name in ("lstm", "gru")}
    assert named["lstm"] == [
        "1000x4x985 fp32",
        "1000x4x985 fp32 ieee",
        "1000x4x985 bf16",
        "400x32x256 fp32, 2 layers, both directions",
        "1000x8x1024 fp16",
        "512x64x1024 bf16",
    ]
    assert "1000x4x985 fp32" in named["gru"]


def test_the_grid_is_two_sweeps_over_all_sizes() -> None:
    cases = OPERATORS["gru"]().grid()
    at = [(case.sizes["batch"], case.sizes["hidden"]) for case in cases]
    assert {hidden for batch, hidden in at if batch == 4} >= {64, 985, 2048}
    assert {batch for batch, hidden in at if hidden == 1024} == {1, 2, 4, 8, 16, 32, 64, 128}
    assert len(cases) == 68


def test_operations_are_those_of_both_products() -> None:
    case = recurrent_case(10, 4, 32, torch.bfloat16)
    forward, backward = OPERATORS["lstm"]().work(case)
    assert forward.operations == 2 * 10 * 4 * (4 * 32) * (32 + 32)
    assert backward.operations == 2 * forward.operations
    assert forward.unit == "bf16"


def test_the_case_sets_torchs_switch_for_tf32() -> None:
    before = torch.backends.cudnn.allow_tf32
    try:
        for ieee in (True, False):
            case = recurrent_case(1, 1, 1, torch.float32, ieee=ieee)
            OPERATORS["gru"]().implementations(case, CPU, grid=True)
            assert torch.backends.cudnn.allow_tf32 is not ieee
    finally:
        torch.backends.cudnn.allow_tf32 = before
