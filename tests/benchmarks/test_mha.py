"""The benchmark of attention: torch passes its own check, ours takes part, work is counted once."""

from __future__ import annotations

import pytest
import torch
from benchmarks.harness.check import relative_errors
from benchmarks.operators import OPERATORS
from benchmarks.operators.mha import KINDS, Kind, assembled, mha_case

CPU = torch.device("cpu")


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_torch_and_ours_agree_with_the_float64_reference(
    monkeypatch: pytest.MonkeyPatch, kind: Kind, need_weights: bool
) -> None:
    monkeypatch.setattr("benchmarks.operators.mha.REFERENCE_SCORES", 400)  # several parts
    operator = OPERATORS["mha"]()
    case = mha_case(5, 8, 16, 2, torch.float32, ieee=True, need_weights=need_weights, kind=kind)
    inputs = operator.inputs(case, CPU, torch.Generator().manual_seed(1))
    for implementation in operator.implementations(case, CPU, grid=True):
        y = implementation.bind(inputs)()
        gradients = torch.autograd.grad(y, list(inputs.leaves.values()), inputs.grad_output)
        outputs = {"y": y.detach()}
        outputs |= {f"d{leaf}": g for leaf, g in zip(inputs.leaves, gradients, strict=True)}
        errors = relative_errors(outputs, operator.reference(case, inputs, sample=False))
        assert errors.keys() == outputs.keys()
        assert max(errors.values()) < 1e-6


def test_the_peer_computes_the_same() -> None:
    operator = OPERATORS["mha"]()
    case = mha_case(2, 4, 16, 2, torch.float32)
    inputs = operator.inputs(case, CPU, torch.Generator().manual_seed(1))
    torchs = operator.implementations(case, CPU, grid=True)[0].bind(inputs)()
    torch.testing.assert_close(assembled(2, *inputs.leaves.values()), torchs)


def test_operations_are_those_of_all_products() -> None:
    case = mha_case(3, 8, 32, 4, torch.bfloat16)
    forward, backward = OPERATORS["mha"]().work(case)
    linear, attention = 2 * 24 * 32 * (3 * 32 + 32), 2 * 3 * 4 * 8 * 8 * (8 + 8)
    assert forward.operations == linear + attention
    assert backward.operations == 2 * linear + attention * 5 // 2
    assert forward.bytes == 2 * (2 * 24 * 32 + 4 * 32 * 32 + 3 * 8 * 8)


def test_the_case_sets_torchs_switch_for_tf32() -> None:
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        for ieee in (True, False):
            case = mha_case(1, 2, 8, 1, torch.float32, ieee=ieee)
            OPERATORS["mha"]().implementations(case, CPU, grid=True)
            assert torch.backends.cuda.matmul.allow_tf32 is not ieee
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
