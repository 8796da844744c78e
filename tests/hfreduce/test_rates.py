"""`benchmark` gives all ranks the same figures for the sizes they ask for."""

from __future__ import annotations

import torch

import hfreduce
from tests.hfreduce.ranks import reducer, run


def timed(rank: int, world: int, store: str) -> list[hfreduce.Rate]:
    group = reducer(rank, world, store)
    return hfreduce.benchmark(group, [4096, 1 << 20, 2 << 20], dtype=torch.bfloat16, rounds=3)


def test_all_ranks_get_the_same_figures() -> None:
    first, second = run(timed, 2)
    assert first == second
    assert [rate.nbytes for rate in first] == [4096, 1 << 20, 2 << 20]
    for rate in first:
        middle, least, most = rate.seconds
        assert 0 < least <= middle <= most
    assert str(first[0]).lstrip().startswith("4 KiB")
    assert str(first[2]).lstrip().startswith("2 MiB")
    assert "GB/s" in str(first[0])
