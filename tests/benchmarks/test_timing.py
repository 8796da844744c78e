"""Samples, their summary, and the order in which they are taken."""

from __future__ import annotations

import gc
import time

import pytest
from benchmarks.harness.timing import (
    interleave,
    no_collection,
    rounds_within,
    summarise,
    wall_times,
)


def test_a_summary_is_the_median_and_the_quartiles() -> None:
    summary = summarise([5.0, 1.0, 2.0, 4.0, 3.0], "graph")
    assert (summary.lower_quartile_ms, summary.median_ms, summary.upper_quartile_ms) == (2, 3, 4)
    assert (summary.samples, summary.method) == (5, "graph")


def test_one_sample_is_its_own_quartiles() -> None:
    summary = summarise([7.0], "wall")
    assert summary.lower_quartile_ms == summary.median_ms == summary.upper_quartile_ms == 7.0


def test_implementations_take_turns_and_each_starts_a_round_as_often() -> None:
    order: list[str] = []
    timers = {name: (lambda name=name: order.append(name)) for name in "abc"}
    samples = interleave(timers, 3)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert {name: len(taken) for name, taken in samples.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(
    ("round_s", "rounds"), [(0.1, 10), (0.0001, 40), (5.0, 4), (0.0, 40)], ids=str
)
def test_rounds_fill_the_budget_within_their_bounds(round_s: float, rounds: int) -> None:
    assert rounds_within(1.001, round_s, least=4, most=40) == rounds


def test_wall_times_are_those_of_one_call_whatever_the_block() -> None:
    synchronised = []
    calls = {
        "slow": [lambda: time.sleep(0.004)],
        "fast": [lambda: time.sleep(0.0005), lambda: time.sleep(0.0005)],
    }
    times = wall_times(calls, lambda: synchronised.append(1), budget_s=0.1)
    assert 4.0 <= times["slow"].median_ms < 8.0
    assert 0.5 <= times["fast"].median_ms < 2.0
    assert times["slow"].samples == times["fast"].samples >= 3
    assert len(synchronised) >= 4 * times["slow"].samples


def test_the_garbage_collector_rests_while_measuring_and_works_afterwards() -> None:
    with no_collection():
        assert not gc.isenabled()
        with no_collection():
            pass
        assert not gc.isenabled(), "an inner use must not end the outer one's rest"
    assert gc.isenabled()
