"""The loader, with real worker processes: what it reads, skips, counts and reports."""

from __future__ import annotations

import itertools
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset, SequentialSampler

from ffrecord import RecordError
from ffrecord.torch import DataLoader, Dataset, GlobalBatchSampler, SampleError, Subset
from tests.ffrecord.torch.sets import Broken, BrokenOldStyle, Letters, N, Numbers, OldStyle


def _lists(batches: Any) -> list[list[int]]:
    return [batch.tolist() for batch in batches]


def _in_order(size: int) -> list[list[int]]:
    return [list(range(first, min(first + size, N))) for first in range(0, N, size)]


@pytest.mark.parametrize("kind", [Numbers, OldStyle])
def test_batches_are_those_asked_for_with_and_without_workers(kind: type, parts: Path) -> None:
    dataset = kind(parts)
    dataset[[0, 1, 2, 3]]  # The parent has read before it forks.
    for workers in (0, 2):
        assert _lists(DataLoader(dataset, 25, num_workers=workers)) == _in_order(25)


def test_a_batch_is_one_read(parts: Path) -> None:
    dataset = Numbers(parts)
    assert len(_lists(DataLoader(dataset, 25))) == dataset.reads == 5


def test_spawned_workers_that_stay_read_every_epoch(parts: Path) -> None:
    dataset = Subset(Numbers(parts) + OldStyle(parts), range(N))
    loader = DataLoader(
        dataset, 25, num_workers=1, multiprocessing_context="spawn", persistent_workers=True
    )
    assert _lists(loader) == _lists(loader) == _in_order(25)


@pytest.mark.parametrize("workers", [0, 2])
def test_skipped_batches_are_not_read_and_move_random_state_on(workers: int, parts: Path) -> None:
    def epochs(step: int) -> list[list[list[int]]]:
        generator = torch.Generator().manual_seed(5)
        loader = DataLoader(
            Numbers(parts), 10, shuffle=True, num_workers=workers, generator=generator
        )
        loader.set_step(step)
        assert len(loader) == 11 - step
        first = _lists(loader)
        loader.set_step(0)
        return [first, _lists(loader)]

    whole, skipped = epochs(0), epochs(4)
    assert skipped == [whole[0][4:], whole[1]]


def test_skipping_holds_for_dropped_tails_batch_samplers_and_workers_that_stay(
    parts: Path,
) -> None:
    dropping = DataLoader(Numbers(parts), 10, drop_last=True)
    dropping.set_step(3)
    assert _lists(dropping) == _in_order(10)[3:10]
    assert len(dropping) == 7
    given = DataLoader(
        Numbers(parts), batch_sampler=_in_order(10), num_workers=1, persistent_workers=True
    )
    assert _lists(given) == _in_order(10)
    given.set_step(9)
    assert _lists(given) == _in_order(10)[9:]
    assert dropping.batch_size == 10


def test_skipping_reads_nothing_of_what_it_skips(parts: Path) -> None:
    dataset = Numbers(parts)
    loader = DataLoader(dataset, 10)
    loader.set_step(8)
    assert len(_lists(loader)) == dataset.reads == 3


def test_steps_beyond_the_batches_are_refused(parts: Path) -> None:
    loader = DataLoader(Numbers(parts), 10)
    for step in (-1, 11):
        with pytest.raises(ValueError, match="give 0 to 10, there are 11"):
            loader.set_step(step)


def test_a_loader_that_is_not_skippable_leaves_samplers_alone(parts: Path) -> None:
    sampler = SequentialSampler(range(N))
    loader = DataLoader(Numbers(parts), 10, sampler=sampler, skippable=False)
    assert loader.sampler is sampler
    with pytest.raises(RuntimeError, match="skippable=True"):
        loader.set_step(1)


def test_a_wrapped_sampler_still_answers(parts: Path) -> None:
    sampler = torch.utils.data.DistributedSampler(range(N), num_replicas=2, rank=1)
    loader = DataLoader(Numbers(parts), 10, sampler=sampler)
    loader.sampler.set_epoch(4)
    assert sampler.epoch == 4


def test_other_data_sets_work() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(4))

    assert list(DataLoader(Letters(), 2)) == [["a", "b"], ["c"]]
    assert _lists(DataLoader(Stream(), 3)) == [[0, 1, 2], [3]]


@pytest.mark.parametrize("workers", [0, 2])
def test_the_sampler_counts_what_arrived_not_what_workers_read_ahead(
    workers: int, parts: Path
) -> None:
    def loader_of(batch: int) -> tuple[DataLoader, GlobalBatchSampler]:
        sampler = GlobalBatchSampler(N, batch, seed=3, tail="uneven")
        return DataLoader(Numbers(parts), batch_sampler=sampler, num_workers=workers), sampler

    loader, sampler = loader_of(10)
    taken = _lists(itertools.islice(loader, 4))
    assert sampler.consumed == 40
    resumed, other = loader_of(7)
    other.load_state_dict(sampler.state_dict())
    rest = _lists(resumed)
    assert [i for batch in taken + rest for i in batch] == next(
        iter(GlobalBatchSampler(N, N, seed=3))
    )
    assert (other.epoch, other.consumed) == (1, 0)
    assert _lists(resumed) != rest
    assert other.epoch == 2


def test_a_state_taken_after_the_last_batch_ends_the_epoch(parts: Path) -> None:
    sampler = GlobalBatchSampler(N, 50)
    states = [sampler.state_dict() for _ in DataLoader(Numbers(parts), batch_sampler=sampler)]
    assert [state["consumed"] for state in states] == [50, 100, 101]
    resumed = GlobalBatchSampler(N, 50)
    resumed.load_state_dict(states[-1])
    loader = DataLoader(Numbers(parts), batch_sampler=resumed)
    assert _lists(loader) == []
    assert resumed.epoch == 1
    assert len(_lists(loader)) == 3


def test_skipping_is_not_mixed_with_resuming(parts: Path) -> None:
    loader = DataLoader(Numbers(parts), batch_sampler=GlobalBatchSampler(N, 50))
    with pytest.raises(RuntimeError, match="load_state_dict"):
        loader.set_step(1)


def test_a_workers_error_names_record_and_file(parts: Path, damaged: Path) -> None:
    cases: list[tuple[Dataset, type[Exception], str]] = [
        (Broken(parts), SampleError, r"sample 77 of .*PART_00001\.ffr"),
        (BrokenOldStyle(parts), SampleError, r"sample 77 of .*PART_00001\.ffr"),
        (Dataset(damaged), RecordError, r"record 3 is damaged: .*damaged\.ffr"),
    ]
    for dataset, kind, told in cases:
        with pytest.raises(kind, match=told) as caught:
            list(DataLoader(dataset, 10, num_workers=1))
        # torch's error holds its own frame, and so the iterator: its workers would wait for the
        # garbage collector, which shuts their queues first, and then for a timeout of 5 s.
        traceback.clear_frames(caught.tb)


@pytest.mark.parametrize(("method", "stay"), [("fork", True), ("fork", False), ("spawn", True)])
def test_a_loop_that_is_left_goes_on_whatever_the_workers(
    method: str, stay: bool, parts: Path
) -> None:
    """What workers have read ahead when a loop is left is read again, not lost."""
    sampler = GlobalBatchSampler(N, 10, seed=3, tail="uneven")
    loader = DataLoader(
        Numbers(parts),
        batch_sampler=sampler,
        num_workers=1,
        multiprocessing_context=method,
        persistent_workers=stay,
    )
    taken = _lists(itertools.islice(loader, 4))
    rest = _lists(loader)
    whole = GlobalBatchSampler(N, 10, seed=3, tail="uneven")
    assert taken + rest == list(whole)
    whole.set_epoch(1)
    assert _lists(loader) == list(whole)


def test_a_state_goes_on_with_other_workers_ranks_and_batches(parts: Path) -> None:
    sampler = GlobalBatchSampler(N, 10, seed=3, tail="uneven")
    loader = DataLoader(Numbers(parts), batch_sampler=sampler, num_workers=2)
    taken = [i for batch in _lists(itertools.islice(loader, 4)) for i in batch]
    state = loader.state_dict()
    rest = []
    for rank in range(2):
        other = GlobalBatchSampler(N, 14, tail="uneven", rank=rank, world_size=2)
        resumed = DataLoader(Numbers(parts), batch_sampler=other, num_workers=rank)
        resumed.load_state_dict(state)
        rest += [i for batch in _lists(resumed) for i in batch]
    assert sorted(taken + rest) == list(range(N))


@pytest.mark.parametrize(
    ("tail", "sizes"), [("pad", [40] * 3), ("drop", [40] * 2), ("uneven", [40, 40, 21])]
)
def test_the_last_batch_is_what_the_tail_policy_says(
    tail: str, sizes: list[int], parts: Path
) -> None:
    sampler = GlobalBatchSampler(N, 40, tail=tail)  # type: ignore[arg-type]
    loader = DataLoader(Numbers(parts), batch_sampler=sampler)
    assert len(loader) == len(sizes)
    assert [len(batch) for batch in loader] == sizes


def test_a_loader_without_a_place_has_no_state(parts: Path) -> None:
    loader = DataLoader(Numbers(parts), 10)
    assert loader.state_dict() == {}
    loader.load_state_dict({})
    with pytest.raises(ValueError, match="give this loader one as batch_sampler"):
        loader.load_state_dict(GlobalBatchSampler(N, 10).state_dict())
