"""Data sets by lists: order, duplicates and negative indices kept, one read a batch."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ffrecord import RecordError
from ffrecord.torch import ConcatDataset, Dataset, GlobalBatchSampler, SampleError, Subset
from tests.ffrecord.torch.sets import Broken, BrokenOldStyle, Letters, N, Numbers, OldStyle


@pytest.mark.parametrize("kind", [Numbers, OldStyle])
def test_a_list_gives_samples_in_its_order(kind: type, parts: Path) -> None:
    dataset = kind(parts)
    assert len(dataset) == N
    assert dataset[[50, 3, 3, -1]] == [50, 3, 3, 100]
    assert dataset[[]] == []


def test_a_record_is_a_sample_where_nothing_else_is_said(parts: Path) -> None:
    assert [bytes(record) for record in Dataset(parts)[[7, 99]]] == [b"7", b"99"]


def test_a_batch_is_one_read(parts: Path) -> None:
    dataset = Numbers(parts)
    assert Subset(dataset + dataset, range(30, 90))[[0, 1, 1, 59]] == [30, 31, 31, 89]
    assert dataset.reads == 1


def test_an_index_alone_is_refused_in_words(parts: Path) -> None:
    for dataset in (Numbers(parts), Numbers(parts) + Numbers(parts), Subset(Numbers(parts), [1])):
        with pytest.raises(TypeError, match="takes a list of indices, not 3"):
            dataset[3]


@given(st.lists(st.integers(-2 * N - 3, 2 * N + 2), max_size=40))
@settings(deadline=None)
def test_a_concatenation_is_its_parts_in_a_row(parts: Path, indices: list[int]) -> None:
    whole = ConcatDataset([Numbers(parts), Letters(), OldStyle(parts)])
    model = [*range(N), *"abc", *range(N)]
    assert whole[indices] == [model[index] for index in indices]
    assert whole.cumulative_sizes == [N, N + 3, 2 * N + 3]


def test_adding_data_sets_joins_them_twice_too(parts: Path) -> None:
    numbers = Numbers(parts)
    joined = numbers + Letters() + numbers
    assert isinstance(joined, ConcatDataset)
    assert len(joined) == 2 * N + 3
    assert joined[[0, 0, N, N, N + 3]] == [0, 0, "a", "a", 0]


def test_subsets_count_from_the_end_and_may_repeat(parts: Path) -> None:
    subset = Subset(Subset(Numbers(parts), [9, 9, -1, 5]), [2, 0, 3])
    assert subset[[0, 1, 2, -1]] == [100, 9, 5, 5]
    assert len(subset) == 3
    assert Subset(Letters(), [2, 1])[[0, 1]] == ["c", "b"]


def test_an_index_out_of_range_is_refused(parts: Path) -> None:
    numbers = Numbers(parts)
    for dataset in (numbers, numbers + numbers, Subset(numbers, range(N))):
        with pytest.raises(IndexError, match="out of range"):
            dataset[[0, len(dataset)]]


def test_random_split_of_torch_works(parts: Path) -> None:
    first, second = torch.utils.data.random_split(Numbers(parts), [60, 41])
    samples: list[Any] = [*first.__getitems__(range(60)), *second.__getitems__(range(41))]
    assert sorted(samples) == list(range(N))


def test_readers_are_found_wherever_data_sets_hold_them(parts: Path) -> None:
    first, second = Numbers(parts), OldStyle(parts)
    joined = Subset(first + Letters() + second, [0, 1]) + first
    assert joined.ffreaders() == [first.reader, second.source]


def test_joining_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no data set"):
        ConcatDataset([])


def test_data_sets_are_pickled(parts: Path) -> None:
    again = pickle.loads(pickle.dumps(Subset(Numbers(parts) + OldStyle(parts), [150, 2])))
    assert again[[0, 1]] == [49, 2]


@pytest.mark.parametrize("kind", [Broken, BrokenOldStyle])
def test_a_failing_sample_of_a_batch_is_told_with_its_file(kind: type, parts: Path) -> None:
    told = rf"sample 77 of {kind.__name__}, .*PART_00001\.ffr: LookupError: no such class"
    for dataset, index in (
        (kind(parts), 77),
        (Subset(ConcatDataset([Letters(), kind(parts)]), range(90)), 80),
    ):
        with pytest.raises(SampleError, match=told) as caught:
            dataset.__getitems__([3, index, 5])
        assert isinstance(caught.value.__cause__, LookupError)


def test_a_failure_keeps_its_type_where_no_loader_asks(parts: Path) -> None:
    with pytest.raises(LookupError, match="no such class"):
        Broken(parts)[[3, 77, 5]]


def test_a_sample_without_a_file_of_its_own_is_told_by_its_index() -> None:
    with pytest.raises(SampleError, match="sample 7 of Subset: IndexError"):
        Subset(Letters(), [0, 1]).__getitems__([0, 7])


def test_a_damaged_record_is_told_with_record_and_file(damaged: Path) -> None:
    with pytest.raises(RecordError, match=r"record 3 is damaged: .*damaged\.ffr"):
        Dataset(damaged)[[0, 3]]


def test_a_process_that_returns_nothing_is_named(parts: Path) -> None:
    class Forgetful(Dataset):
        def process(self, indices: list[int], data: list[Any]) -> Any:
            data.reverse()

    with pytest.raises(TypeError, match=r"Forgetful\.process returned None"):
        Forgetful(parts)[[0, 1]]


def test_a_sampler_of_batches_in_the_wrong_place_is_told_the_right_one(parts: Path) -> None:
    dataset = Dataset(parts)
    loader = torch.utils.data.DataLoader(dataset, sampler=GlobalBatchSampler(len(dataset), 2))
    with pytest.raises(TypeError, match="batch_sampler="):
        next(iter(loader))
