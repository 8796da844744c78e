"""Scripts as the original's users wrote them run unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The lines from the original's README that matter, with gloo for nccl and no device_ids on the CPU.
SCRIPT = """
import os, sys
import torch, torch.distributed as dist
import hfai, hfai.multiprocessing
from hfai.nn.parallel import DistributedDataParallel

def main(local_rank, gpus):
    ip, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    hosts, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group(backend="gloo", init_method=f"tcp://{ip}:{port}",
                            world_size=hosts * gpus, rank=rank * gpus + local_rank)
    place = hfai.multiprocessing.place(local_rank)
    assert (place.rank, place.world_size) == (dist.get_rank(), dist.get_world_size()), place
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model = DistributedDataParallel(model)
    for _ in range(3):
        model(torch.full((2, 4), float(local_rank))).sum().backward()
    print(f"rank {dist.get_rank()}: {model.path}, {model.module.bias.grad.item():g}", flush=True)
    model.reducer.stop()
    dist.barrier()

if __name__ == "__main__":
    hfai.multiprocessing.spawn(main, args=(2,), nprocs=2, bind_numa=True)
"""


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_the_originals_script_runs_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    env = {
        **os.environ,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "1",
        "RANK": "0",
        "OMP_NUM_THREADS": "1",
    }
    # Unbuffered, a line and its end are written apart, and two ranks' lines run into each other.
    env.pop("PYTHONUNBUFFERED", None)
    done = subprocess.run(
        [sys.executable, path], env=env, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["rank 0: hfreduce, 6", "rank 1: hfreduce, 6"]


PLACED = """
import pathlib, sys
import hfai.multiprocessing

def main(local_rank, directory):
    place = hfai.multiprocessing.place(local_rank)
    pathlib.Path(directory, str(local_rank)).write_text(f"{place.rank}/{place.world_size}")

if __name__ == "__main__":
    hfai.multiprocessing.spawn(main, args=(sys.argv[1],), nprocs=2, bind_numa=False)
"""


def test_torchrun_with_one_process_a_machine_may_start_a_script_that_spawns(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PLACED)
    env = {
        **os.environ,
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    done = subprocess.run(
        [sys.executable, path, tmp_path], env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert [(tmp_path / name).read_text() for name in "01"] == ["2/4", "3/4"]


REFUSALS = """
import os
import hfai
said = []
for nprocs, env in ((None, "1"), (0, "1"), (2, "4")):
    os.environ |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": env}
    try:
        hfai.multiprocessing.spawn(print, nprocs=nprocs)
    except (ValueError, RuntimeError) as error:
        said.append(str(error))
print("|".join(said))
"""


def test_senseless_launches_are_refused() -> None:
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        [sys.executable, "-c", REFUSALS], env=env, capture_output=True, text=True, timeout=60
    )
    gpus, count, torchrun = done.stdout.split("|")
    assert "give nprocs" in gpus
    assert "nprocs=0: at least one process is needed" in count
    assert "torchrun has started a process for each GPU already" in torchrun


def affinity(local_rank: int, path: str) -> None:
    Path(path, str(local_rank)).write_text(str(sorted(os.sched_getaffinity(0))))


def test_processes_run_where_they_are_put(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from hfai.multiprocessing import numa, spawn

    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("one processor: nothing to choose")
    halves = [{allowed[0]}, {allowed[1]}]
    monkeypatch.setattr(numa, "here", lambda nprocs: halves)
    spawn(affinity, (str(tmp_path),), nprocs=2)
    for rank in range(2):
        assert (tmp_path / str(rank)).read_text() == str(sorted(halves[rank]))
