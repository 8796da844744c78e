"""The sums between nodes by a real MPI, started by its own mpiexec."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

SCRIPT = """
import os, sys
from mpi4py import MPI
import torch
from torch import distributed as dist
import hfreduce
from tests.hfreduce.test_nodes import data, defined

rank, world = MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()
torch.set_num_threads(1)
nodes = [peer // 2 for peer in range(world)]
os.environ["HFREDUCE_NODE"] = str(nodes[rank])
store = dist.FileStore(sys.argv[1], world)
group = hfreduce.HierarchicalReducer(
    store, rank, world, timeout=20, network="mpi", piece_bytes=64 << 10
)
for dtype in (torch.float32, torch.bfloat16):
    for count in (0, 1, 1000, 300_001):
        parts = [data(peer, count, dtype) for peer in range(world)]
        result = parts[rank].clone()
        group.all_reduce(result)
        assert torch.equal(result, defined(parts, nodes, "sum")), (dtype, count)
group.barrier()

import time
late = hfreduce.HierarchicalReducer(store, rank, world, timeout=0.5, network="mpi", name="late")
if rank == 2:
    time.sleep(0.8)
tensor = torch.ones(1000)
try:
    late.all_reduce(tensor)
except hfreduce.PeerError:
    time.sleep(0.5)  # whatever is sent late
    assert (tensor == 1).all()
else:  # the late one may find that all others have sent, before they gave up
    assert rank == 2 and (tensor == 3).all()
    try:
        late.all_reduce(tensor)
    except hfreduce.PeerError:
        pass
    else:
        raise AssertionError("the others have left")
os.write(1, f"whole {rank}\\n".encode())
"""


def mpiexec() -> str:
    """Return MPI's launcher, or skip."""
    pytest.importorskip("mpi4py", exc_type=ImportError)
    found = shutil.which("mpiexec", path=sysconfig.get_path("scripts")) or shutil.which("mpiexec")
    if found is None:
        pytest.skip("needs an MPI's mpiexec, such as of mpich")
    return found


def test_sums_over_mpi_have_the_defined_bits_and_late_ranks_change_nothing(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *sys.path])}
    done = subprocess.run(
        [mpiexec(), "-n", "3", sys.executable, str(script), str(tmp_path / "store")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(re.findall(r"whole \d", done.stdout)) == [f"whole {rank}" for rank in range(3)]
