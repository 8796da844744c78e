"""The checkpoint benchmark's simulation of a plan, on few ranks."""

from __future__ import annotations

import pytest
from benchmarks.checkpoint import planning


@pytest.mark.parametrize("ranks", [1, 4])
def test_planning_is_timed_for_each_rank_rank_0_and_a_reader(ranks: int) -> None:
    found = planning(ranks, 20)
    assert set(found) == {"each rank's plan", "rank 0's record", "reading all indexes"}
    assert all(seconds >= 0 for seconds in found.values())
