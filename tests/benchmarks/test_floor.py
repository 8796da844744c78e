"""Bytes, operations, the floor, and how many input sets a graph rotates over."""

from __future__ import annotations

import pytest
import torch
from benchmarks.harness.case import Work
from benchmarks.harness.ceiling import UNITS, Ceilings, measure_ceilings
from benchmarks.harness.graphs import MOST_SETS, set_count
from benchmarks.operators import OPERATORS
from benchmarks.operators.norm import norm_case
from benchmarks.operators.recurrent import recurrent_case

H200 = Ceilings(4.28e12, {"fp32": 51e12})


def test_layer_norms_bytes_are_each_tensor_once() -> None:
    operator = OPERATORS["layer_norm"]()
    case = norm_case((25600, 1024), torch.bfloat16)
    forward, backward = operator.work(case)
    x, weight = 25600 * 1024 * 2, 1024 * 2
    assert forward.bytes == x + 2 * weight + x
    assert backward.bytes == (x + x + weight) + (x + 2 * weight)
    assert operator.input_bytes(case) == x + x + 2 * weight


def test_rms_norm_moves_no_bias() -> None:
    case = norm_case((100, 64), torch.float32)
    forward, backward = OPERATORS["rms_norm"]().work(case)
    assert forward.bytes == 4 * (2 * 6400 + 64)
    assert backward.bytes == 4 * (3 * 6400 + 2 * 64)


@pytest.mark.parametrize(
    ("shape", "dtype", "forward_ms", "backward_ms"),
    [
        ((25600, 1024), torch.float32, 0.049, 0.0735),
        ((25600, 1024), torch.bfloat16, 0.0245, 0.0367),
        ((65536, 8192), torch.bfloat16, 0.502, 0.753),
    ],
    ids=str,
)
def test_the_floor_of_a_memory_bound_call_is_its_bytes_over_the_bandwidth(
    shape: tuple[int, ...], dtype: torch.dtype, forward_ms: float, backward_ms: float
) -> None:
    forward, backward = OPERATORS["layer_norm"]().work(norm_case(shape, dtype))
    assert H200.floor_ms(forward) == pytest.approx(forward_ms, rel=0.01)
    assert H200.floor_ms(backward) == pytest.approx(backward_ms, rel=0.01)


def test_the_floor_of_a_call_bound_by_arithmetic_is_its_operations_over_the_rate() -> None:
    assert H200.floor_ms(Work(bytes=1000, operations=51 * 10**9)) == pytest.approx(1.0)


def test_the_ceilings_of_this_machine_are_measured() -> None:
    ceilings = measure_ceilings(torch.device("cpu"), {"fp32"})
    assert set(ceilings.operations_per_second) == {"fp32"} <= set(UNITS)
    assert 1e8 < ceilings.bytes_per_second < 1e13
    assert 1e8 < ceilings.operations_per_second["fp32"] < 1e14


@pytest.mark.parametrize(
    ("floor_ms", "set_bytes", "count"),
    [
        (0.049, 210 << 20, 41),  # a replay of 2 ms
        (1e-6, 256, MOST_SETS),  # an empty kernel's time counts, not the floor
        (0.502, 2 << 30, 4),
        (0.01, 8 << 30, 4),  # a quarter of the memory
        (40.0, 52 << 30, 1),
    ],
    ids=str,
)
def test_input_sets_fill_a_replay_within_a_quarter_of_the_memory(
    floor_ms: float, set_bytes: int, count: int
) -> None:
    assert set_count(floor_ms, set_bytes, free_bytes=140 << 30) == count


def test_a_recurrence_of_many_steps_takes_few_input_sets() -> None:
    case = recurrent_case(1000, 4, 985, torch.float32, layers=2)
    least_ms = OPERATORS["lstm"]().least_ms(case)
    assert least_ms == pytest.approx(1.9)
    assert set_count(least_ms, 62 << 20, free_bytes=140 << 30) == 2
    assert set_count(least_ms, 62 << 20, free_bytes=140 << 30, target_ms=1.0) == 1


def test_the_grid_has_every_size_and_type_once_and_a_sensible_order() -> None:
    for operator in (OPERATORS[name]() for name in OPERATORS):
        grid = operator.grid()
        keys = {(*case.sizes.items(), case.dtype) for case in grid}
        assert len(keys) == len({case.name for case in grid}) == len(grid) >= 60
        if operator.name == "mha":  # what models have most: heads of 64, no mask
            first = [case.sizes for case in grid[:20]]
            assert {sizes["features"] // sizes["heads"] for sizes in first} == {64}
            assert {sizes["kind"] for sizes in first} == {0}
            continue
        sizes = [operator.input_bytes(case) for case in grid]
        assert sizes[0] == min(sizes)
        assert sizes[-1] == max(sizes)


def test_the_published_cases_are_named_by_shape_and_type() -> None:
    assert [case.name for case in OPERATORS["layer_norm"]().cases()] == [
        "25600x1024 fp32",
        "25600x1024 bf16",
        "65536x8192 bf16",
        "64x64x64x40 fp32",
        "64x768 fp32",
    ]
