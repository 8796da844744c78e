"""The sampler: the same global batches for any ranks, and an exact way on from any state."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffrecord.torch import GlobalBatchSampler
from tests.ffrecord.torch.sets import N, complaint_of_a_rank, indices_of_a_rank


def _ranks(n: int, batch: int, world: int, **options: Any) -> list[GlobalBatchSampler]:
    return [
        GlobalBatchSampler(n, batch, rank=rank, world_size=world, **options)
        for rank in range(world)
    ]


def _global_batches(samplers: list[GlobalBatchSampler]) -> list[list[int]]:
    """Put the ranks' parts of each batch together again, in the order of positions."""
    steps = itertools.zip_longest(*samplers, fillvalue=[])
    return [
        [index for row in itertools.zip_longest(*parts) for index in row if index is not None]
        for parts in steps
    ]


@given(
    n=st.integers(1, 300),
    share=st.integers(1, 8),
    world=st.integers(1, 6),
    tail=st.sampled_from(["pad", "uneven"]),
    shuffle=st.booleans(),
)
@settings(max_examples=120, deadline=None)
def test_global_batches_are_the_same_for_one_rank_and_for_many(
    n: int, share: int, world: int, tail: str, shuffle: bool
) -> None:
    options = {"tail": tail, "shuffle": shuffle, "seed": 4}
    alone = _global_batches(_ranks(n, share * world, 1, **options))
    assert _global_batches(_ranks(n, share * world, world, **options)) == alone


@given(
    n=st.integers(1, 300),
    batches=st.tuples(st.integers(1, 8), st.integers(1, 8)),
    worlds=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    steps=st.integers(0, 40),
)
@settings(max_examples=120, deadline=None)
def test_a_resumed_epoch_reads_every_record_once_with_other_ranks_and_batches(
    n: int, batches: tuple[int, int], worlds: tuple[int, int], steps: int
) -> None:
    before = _ranks(n, batches[0] * worlds[0], worlds[0], tail="uneven", seed=9)
    taken = _global_batches(before)[:steps]
    before[0].advance(len(taken))
    state = json.loads(json.dumps(before[0].state_dict()))
    after = _ranks(n, batches[1] * worlds[1], worlds[1], tail="uneven")
    for sampler in after:
        sampler.load_state_dict(state)
    indices = [index for batch in taken + _global_batches(after) for index in batch]
    whole = GlobalBatchSampler(n, n, seed=9)
    assert indices == next(iter(whole))
    assert sorted(indices) == list(range(n))


def test_processes_of_a_group_share_the_batches_without_being_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(indices_of_a_rank, [(str(tmp_path / "store"), r) for r in (0, 1)])
        complaints = pool.starmap(
            complaint_of_a_rank, [(str(tmp_path / "other"), rank) for rank in (0, 1)]
        )
    assert found == [list(sampler) for sampler in _ranks(N, 10, 2, seed=3)]
    for complaint in complaints:  # every rank would have read everything
        assert "made for 1 rank(s), before torch.distributed was initialised with 2" in complaint


def test_a_resumed_run_is_the_run_that_was_not_stopped() -> None:
    straight = GlobalBatchSampler(103, 8, seed=2, rank=1, world_size=4)
    straight.set_epoch(3)
    batches = list(straight)
    straight.advance(5)
    resumed = GlobalBatchSampler(103, 8, rank=1, world_size=4)
    resumed.load_state_dict(straight.state_dict())
    assert list(resumed) == batches[5:]
    assert (resumed.epoch, resumed.remaining, len(resumed)) == (3, 8, 13)


def test_a_billion_records_resume_in_the_middle_at_once() -> None:
    sampler = GlobalBatchSampler(10**9, 256, seed=1)
    state = sampler.state_dict() | {"consumed": 5 * 10**8}
    times = []
    for _ in range(5):
        start = time.perf_counter()
        sampler.load_state_dict(state)
        assert len(next(iter(sampler))) == 256
        times.append(time.perf_counter() - start)
    assert min(times) < 0.01


@given(n=st.integers(1, 200), share=st.integers(1, 6), world=st.integers(1, 5))
@settings(max_examples=100, deadline=None)
def test_padded_ranks_take_equal_steps_of_equal_size_and_leave_nothing_out(
    n: int, share: int, world: int
) -> None:
    samplers = _ranks(n, share * world, world)
    parts = [list(sampler) for sampler in samplers]
    assert {len(batch) for part in parts for batch in part} == {share}
    assert {len(part) for part in parts} == {len(samplers[0])} == {-(-n // (share * world))}
    assert {index for part in parts for batch in part for index in batch} == set(range(n))


def test_dropping_leaves_the_last_batch_out_on_all_ranks() -> None:
    samplers = _ranks(21, 6, 3, tail="drop")
    assert [len(list(sampler)) for sampler in samplers] == [3, 3, 3] == [len(s) for s in samplers]
    assert len({i for s in samplers for batch in s for i in batch}) == 18


def test_uneven_ranks_say_how_uneven_they_are() -> None:
    samplers = _ranks(14, 6, 3, tail="uneven")
    assert samplers[0].tail_sizes() == [1, 1, 0]
    assert [len(s) for s in samplers] == [3, 3, 2] == [len(list(s)) for s in samplers]
    assert _ranks(14, 6, 3)[0].tail_sizes() == [2, 2, 2]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    sampler = GlobalBatchSampler(50, 50)
    first = next(iter(sampler))
    sampler.set_epoch(1)
    other = next(iter(GlobalBatchSampler(50, 50, seed=1)))
    assert len({tuple(order) for order in (first, next(iter(sampler)), other)}) == 3


def test_setting_the_epoch_that_is_under_way_keeps_the_place() -> None:
    sampler = GlobalBatchSampler(50, 10)
    sampler.advance(2)
    sampler.set_epoch(0)
    assert sampler.consumed == 20
    sampler.set_epoch(1)
    assert sampler.consumed == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dataset": 0}, "no records"),
        ({"world_size": 3}, "multiple of world_size, 3"),
        ({"global_batch": 0}, "global_batch is 0"),
        ({"rank": 2, "world_size": 2}, "rank is 2: give 0 to 1"),
        ({"seed": 1 << 63}, "seed is 9223372036854775808: give a signed integer of 64 bits"),
        ({"tail": "short"}, '"pad", "drop" or "uneven"'),
        ({"dataset": 7, "tail": "drop"}, "would leave out all 7"),
    ],
)
def test_arguments_that_contradict_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalBatchSampler(**{"dataset": 100, "global_batch": 8, **arguments})


@pytest.mark.parametrize("change", [{"version": 2}, {"n": 99}, {"consumed": 101}, {"consumed": -1}])
def test_a_state_that_does_not_fit_is_refused(change: dict[str, int]) -> None:
    sampler = GlobalBatchSampler(100, 10)
    with pytest.raises(ValueError, match="the state"):
        sampler.load_state_dict(sampler.state_dict() | change)
