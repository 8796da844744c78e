"""The measure of error, what counts as wrong, and the float64 references themselves."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from benchmarks.harness.case import Piece
from benchmarks.harness.check import (
    beyond_tolerance,
    less_accurate,
    relative_errors,
    run_once,
)
from benchmarks.operators import OPERATORS
from benchmarks.operators.norm import CHUNK_ELEMENTS, SAMPLED_ROWS, norm_case, row_parts
from torch import Tensor


def whole(output: str, expected: Tensor) -> Piece:
    """Return a piece that is all of an output."""
    return Piece(output, expected, lambda tensor: tensor)


def test_the_error_is_relative_and_in_the_two_norm_over_all_pieces() -> None:
    expected = torch.tensor([3.0, 4.0, 0.0, 12.0], dtype=torch.float64)
    actual = expected + torch.tensor([0.0, 0.0, 1.3, 0.0])
    pieces = [
        Piece("y", expected[:2], lambda tensor: tensor[:2]),
        Piece("y", expected[2:], lambda tensor: tensor[2:]),
    ]
    assert relative_errors({"y": actual}, pieces) == {"y": pytest.approx(0.1)}


def test_zeros_where_zeros_are_due_are_no_error() -> None:
    zeros = torch.zeros(3, dtype=torch.float64)
    assert relative_errors({"y": zeros}, [whole("y", zeros)]) == {"y": 0.0}


def test_one_element_nobody_wrote_is_wrong() -> None:
    expected = torch.randn(100, dtype=torch.float64)
    actual = expected.clone()
    actual[57] = math.nan
    errors = relative_errors({"y": actual}, [whole("y", expected)])
    assert math.isnan(errors["y"])
    assert beyond_tolerance(errors, 1e-2, {}) == ["y is off by nan (allowed 0.01)"]


def test_an_output_of_another_shape_is_refused_and_not_broadcast() -> None:
    with pytest.raises(ValueError, match=r"y has shape \(1,\) where the reference has \(4,\)"):
        relative_errors({"y": torch.zeros(1)}, [whole("y", torch.ones(4).double())])


def test_only_outputs_beyond_the_tolerance_are_wrong() -> None:
    errors = {"y": 1e-3, "dx": 3e-2}
    assert beyond_tolerance(errors, 1e-2, {}) == ["dx is off by 0.03 (allowed 0.01)"]


@pytest.mark.parametrize(
    ("torchs", "fault"),
    [
        (0.025, []),
        (0.015, ["dx is off by 0.03 (allowed 0.022)"]),
        (math.nan, ["dx is off by 0.03 (allowed 0.01)"]),
    ],
    ids=["as good", "worse", "no number"],
)
def test_what_is_about_as_accurate_as_torch_is_not_wrong(torchs: float, fault: list[str]) -> None:
    assert beyond_tolerance({"dx": 0.03}, 0.01, {"dx": torchs}) == fault


def test_nothing_excuses_an_output_that_is_no_better_than_zeros() -> None:
    assert beyond_tolerance({"dx": 0.9}, 0.01, {"dx": 0.9}) == ["dx is off by 0.9 (allowed 0.5)"]


def test_ours_is_flagged_beyond_one_and_a_half_times_torchs_error() -> None:
    torchs = {"y": 1e-6, "dx": 1e-6, "dweight": 1e-9}
    ours = {"y": 1.4e-6, "dx": 1.6e-6, "dweight": 9e-9}
    flags = less_accurate(ours, torchs, torch.float32)
    assert flags == ["dx's error is 1.60x torch's"], "dweight's error is below fp32's rounding"


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
@pytest.mark.parametrize("shape", [(37, 24), (3, 2, 5, 7), (1, 3)], ids=str)
def test_the_reference_is_what_autograd_gets_in_float64(name: str, shape: tuple[int, ...]) -> None:
    operator, case = OPERATORS[name](), norm_case(shape, torch.float64)
    device = torch.device("cpu")
    inputs = operator.inputs(case, device, torch.Generator(device).manual_seed(3))
    torchs = operator.implementations(case, device, grid=True)[0]
    assert torchs.name == "torch"
    outputs = run_once(torchs.bind(inputs), inputs, inputs.grad_output)
    errors = relative_errors(outputs, operator.reference(case, inputs, sample=False))
    assert set(errors) == {"y", *(f"d{leaf}" for leaf in inputs.leaves)}
    assert max(errors.values()) < 1e-13


@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_the_reference_catches_a_fault_in_any_output(name: str) -> None:
    operator, case = OPERATORS[name](), norm_case((6, 32), torch.float32)
    device = torch.device("cpu")
    inputs = operator.inputs(case, device, torch.Generator(device).manual_seed(4))
    torchs = operator.implementations(case, device, grid=True)[0]
    right = run_once(torchs.bind(inputs), inputs, inputs.grad_output)
    for output in right:
        spoilt = {**right, output: right[output] * 1.01}
        errors = relative_errors(spoilt, operator.reference(case, inputs, sample=False))
        wrong = beyond_tolerance(errors, operator.tolerance(case), {})
        assert [words.split()[0] for words in wrong] == [output]


def test_parts_cover_every_row_once_and_bound_the_memory() -> None:
    for rows, length in ((1, 200003), (65536, 8192), (262144, 40), (3, CHUNK_ELEMENTS * 2)):
        parts = row_parts(rows, length, sample=False)
        assert parts[0].start == 0
        assert all(a.stop == b.start for a, b in pairwise(parts))
        assert parts[-1].stop == rows
        assert all((p.stop - p.start) * length <= max(CHUNK_ELEMENTS, length) for p in parts)


def test_a_sample_takes_rows_at_both_ends_and_between() -> None:
    parts = row_parts(65536, 200003, sample=True)
    assert [part.start for part in parts] == [0, 32736, 65536 - SAMPLED_ROWS]
    assert {part.stop - part.start for part in parts} == {SAMPLED_ROWS}
    assert row_parts(10, 8, sample=True) == row_parts(10, 8, sample=False)


def test_a_sampled_reference_leaves_out_what_needs_every_row() -> None:
    operator, case = OPERATORS["layer_norm"](), norm_case((500, 8), torch.float32)
    device = torch.device("cpu")
    inputs = operator.inputs(case, device, torch.Generator(device).manual_seed(5))
    pieces = list(operator.reference(case, inputs, sample=True))
    assert {piece.output for piece in pieces} == {"y", "dx"}
    assert sum(piece.expected.shape[0] for piece in pieces) == 2 * 3 * SAMPLED_ROWS
