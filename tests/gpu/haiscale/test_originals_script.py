"""The lines of the original's README run unchanged over NCCL, by two ranks or, on one GPU, one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.multiprocessing.test_spawn import free_port

SCRIPT = """
import os
import torch, torch.distributed as dist
import hfai, hfai.multiprocessing
from hfai.nn.parallel import DistributedDataParallel

def main(local_rank, gpus):
    torch.cuda.set_device(local_rank)
    ip, port = os.environ["MASTER_IP"], os.environ["MASTER_PORT"]
    hosts, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    dist.init_process_group(backend="nccl", init_method=f"tcp://{ip}:{port}", world_size=hosts * gpus, rank=rank * gpus + local_rank)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1).cuda()
    model = DistributedDataParallel(model, device_ids=[local_rank])
    for _ in range(3):
        model(torch.full((2, 4), local_rank + 1.0).cuda()).sum().backward()
    print(f"weight {model.module.weight.grad.mean().item():g}", flush=True)
    model.reducer.stop()
    dist.destroy_process_group()

if __name__ == "__main__":
    hfai.multiprocessing.spawn(main, args=(GPUS,), nprocs=GPUS, bind_numa=True)
"""  # noqa: E501


def test_the_originals_lines_run_unchanged(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    gpus = min(2, torch.cuda.device_count())  # NCCL needs one for each rank
    path.write_text(SCRIPT.replace("GPUS", str(gpus)))
    env = os.environ | {
        "MASTER_IP": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "1",
        "RANK": "0",
    }
    done = subprocess.run(
        [sys.executable, path], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    weight = 3 * (2 + 4) / 2 if gpus == 2 else 3 * 2  # three passes, on average over the ranks
    assert done.stdout.count(f"weight {weight:g}\n") == gpus, done.stdout
