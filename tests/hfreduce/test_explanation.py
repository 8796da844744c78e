"""`explain` says what there is, and changes nothing."""

from __future__ import annotations

import pytest
import torch
from torch import distributed as dist

import hfreduce
from tests.hfreduce.ranks import reducer, run


def explained(rank: int, world: int, store: str) -> tuple[str, str, str, str]:
    group = reducer(rank, world, store, threads=1)
    dist.init_process_group(
        "hfreduce", store=dist.FileStore(f"{store}-2", world), rank=rank, world_size=world
    )
    before = str(hfreduce.explain())
    dist.all_reduce(torch.ones(3))
    after = str(hfreduce.explain())
    over_gloo = dist.new_group(backend="gloo")
    gloo = str(hfreduce.explain(over_gloo))
    dist.barrier(over_gloo)  # its connections are made when a rank asks: none may leave before
    return str(hfreduce.explain(group)), before, after, gloo


def test_the_path_of_a_group_and_its_reason_are_said() -> None:
    for own, before, after, gloo in run(explained, 2):
        assert "adds with" in own
        assert "rank 0 (pid" in own
        assert "memory that the ranks share: all are on this machine" in own
        assert "4 slots of 512 KiB" in own
        assert "30 s without progress" in own
        assert "of hfreduce, not used yet: its first collective decides" in before
        assert "1800 s without progress" in after
        assert "of gloo: hfreduce has no part in it by itself" in gloo


def test_without_a_group_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFREDUCE_INSTRUCTIONS", "portable")
    facts = hfreduce.explain().facts
    assert facts["engine"].startswith("adds with portable by HFREDUCE_INSTRUCTIONS")
    assert set(facts) == {"engine", "processors", "GPUs"}
