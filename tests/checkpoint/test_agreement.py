"""Ranks whose calls or meshes differ: one checkpoint that is whole, or one error and none."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hfai import checkpoint
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.verify import verify
from tests.checkpoint.test_ranks import start
from tests.hfreduce.ranks import leave, run


def meshes(rank: int, world: int, store: str, directory: str) -> str:
    """Save tensors of several meshes, replicas with meshes of their own, and half of a tensor."""
    start(rank, world, store)
    square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = square["data"], square["tensor"]
    column, row = tensor.get_local_rank(), data.get_local_rank()
    items = 1 << 19  # more than are written by one rank
    lines = {
        f"a.{column}": distribute_tensor(torch.full((items,), 10.0 + column), data, [Replicate()]),
        f"b.{row}": distribute_tensor(torch.full((items,), 20.0 + row), tensor, [Replicate()]),
    }
    checkpoint.save(f"{directory}/lines", lines, rng=False, threads=1, timeout=20)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(300, 1024), nn.Linear(1024, 300))
    parallelize_module(net, tensor, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    checkpoint.save(f"{directory}/replicas", net, rng=False, threads=1, timeout=20)
    half: Any = DTensor.from_local(torch.ones(4), DeviceMesh("cpu", [0, 1, 2, 3]), [Shard(0)])
    two = dist.new_group([0, 1])
    error = ""
    if rank < 2:
        checkpoint.save(f"{directory}/half", {"h": torch.ones(3)}, group=two, timeout=20)
        try:
            checkpoint.save(f"{directory}/half", {"h": half}, group=two, threads=1, timeout=20)
        except checkpoint.CheckpointError as caught:
            error = str(caught)
    leave()
    return error


def test_meshes_are_told_apart_replicas_are_written_once_and_half_a_tensor_is_refused(
    tmp_path: Path,
) -> None:
    errors = run(meshes, 4, str(tmp_path), timeout=60)
    assert errors[0] == errors[1]
    assert "the parts of model/h that they hold lack 8 of its 16 items" in errors[0]
    lines = checkpoint.load(tmp_path / "lines")["model"]
    for name, value in {"a.0": 10.0, "a.1": 11.0, "b.0": 20.0, "b.1": 21.0}.items():
        assert (lines[name] == value).all()
    for name in ("lines", "replicas"):
        with CheckpointFiles(tmp_path / name) as files:
            assert verify(files, 1) == []
            sizes = [index.size - index.header for index in files.indexes()]
            assert max(sizes) < 1.1 * sum(sizes) / 4
    assert sum(sizes) < 4 * (2 * 300 * 1024 + 1024 + 300) + 4096 * 8, "each part is there once"
    assert (checkpoint.load(tmp_path / "half")["model"]["h"] == 1).all(), "the old one stays"


def calls(rank: int, world: int, store: str, directory: str, alone: int) -> list[Any]:
    """One rank saves alone, then all do, and with steps and names that differ."""
    start(rank, world, store)
    value = {"w": torch.zeros(1000)}
    found: list[Any] = []

    def attempt(step: int, path: str = "a", timeout: float = 20) -> None:
        value["w"].fill_(step)
        began = time.monotonic()
        try:
            checkpoint.save(
                f"{directory}/{path}", value, step=step, threads=1, timeout=timeout, rng=False
            )
            text = "saved"
        except checkpoint.CheckpointError as error:
            text = str(error)
        found.append((text, time.monotonic() - began < 5))
        dist.barrier()

    for first in (1, 4):  # no save before, and one
        if rank == alone:
            with pytest.raises(checkpoint.CheckpointError, match="did not come"):
                checkpoint.save(
                    f"{directory}/a", value, step=first, threads=1, timeout=0.3, rng=False
                )
        dist.barrier()
        for step in (first + 1, first + 2):
            attempt(step)
    attempt(10 + rank)
    if rank == 0:
        with pytest.raises(checkpoint.CheckpointError, match="others were at step 11"):
            checkpoint.save(f"{directory}/a", value, step=11, threads=1, timeout=5, rng=False)
    attempt(12, f"p{rank}")
    attempt(13)
    # One save more on rank 0, in the background.
    for step in (20, 21):
        value["w"].fill_(step)
        for _ in range(1 + (rank == 0 and step == 20)):
            handle = (
                checkpoint.save_async(
                    f"{directory}/a", value, step=step, threads=1, timeout=5, rng=False
                )
                if step == 20 or rank
                else None
            )
        dist.barrier()
    try:
        if rank:
            assert handle is not None
            handle.wait()
        else:
            checkpoint.save(f"{directory}/a", value, step=21, threads=1, timeout=5, rng=False)
        found.append("saved")
    except checkpoint.CheckpointError as error:
        found.append(str(error))
    leave()
    return found


@pytest.mark.parametrize("alone", [0, 1])
def test_calls_that_differ_are_refused_on_all_ranks_and_those_after_pair_again(
    alone: int, tmp_path: Path
) -> None:
    one, other = run(calls, 2, str(tmp_path), alone, timeout=60)
    for found in (one, other):
        assert all(soon for _, soon in found[:-1]), found
        # A rank that came alone may cost one save, never a timeout.
        assert [text for text, _ in found[1:4:2]] == ["saved"] * 2, found
        assert "rank 0 saves step 10 to" in found[4][0]
        assert "rank 1 saves step 11 to" in found[4][0]
        assert f"step 12 to {tmp_path}/p1" in found[5][0]
        assert found[6][0] == "saved"
        assert "rank 0 saves step 20 to" in found[7]
        assert "rank 1 saves step 21 to" in found[7]
    assert [text for text, _ in one[:6]] == [text for text, _ in other[:6]]
    assert sorted(os.listdir(tmp_path)) == ["a"]
    loaded = checkpoint.load(tmp_path / "a")
    assert loaded["step"] == 20
    assert (loaded["model"]["w"] == 20).all()


def limit(size: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


@pytest.mark.parametrize("ask", [False, True])
def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_save(
    ask: bool, tmp_path: Path
) -> None:
    value = {"w": torch.ones(1_000_000)}
    limit(1 << 20)
    try:
        handle: Any = checkpoint.save_async(tmp_path / "a", value)
        while not handle.done():
            time.sleep(0.001)
    finally:
        limit(resource.RLIM_INFINITY)
    if ask:
        assert "File too large" in str(handle.error())
    del handle
    if not ask:
        with pytest.raises(checkpoint.CheckpointError, match=r"background.*too large"):
            checkpoint.save_async(tmp_path / "a", value)
    checkpoint.save_async(tmp_path / "a", value).wait()
    assert (checkpoint.load(tmp_path / "a")["model"]["w"] == 1).all()


UNHEARD = """
import resource, sys, torch
from hfai import checkpoint
value = {"w": torch.ones(300_000)}
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
checkpoint.save_async(sys.argv[1] + "/a", value)
manager = checkpoint.CheckpointManager(sys.argv[1])
manager.save(1, value)
"""


def test_failures_that_nobody_asked_for_are_said_at_the_end(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNHEARD, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    lines = done.stderr.splitlines()
    assert [line.split(":")[1] for line in lines] == [
        f" {tmp_path}/{name} was not saved" for name in ("a", "step-00000001")
    ], lines
    assert all("File too large" in line for line in lines)
