"""How fast two ranks with a GPU each add tensors in host memory as if on two machines, by engine.

    python benchmarks/allreduce_nccl.py           # needs two GPUs; 30 seconds

Both count as machines of their own, so hfreduce's ranks meet through a network alone: NCCL, in
pieces of several sizes, or TCP. Once NCCL has what one host offers (NVLink, peer access), once its
sockets alone over the loopback device, which is the nearest to two machines that one has. The
baseline is gloo's own all-reduce of the same tensors.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import distributed as dist
from torch import multiprocessing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

import hfreduce
from benchmarks.allreduce_nodes import BASELINE, MIB, Way, case
from benchmarks.harness import machine

SIZES = [64 << 10, MIB, 4 * MIB, 16 * MIB, 256 * MIB]
PIECES = [32 * MIB, 128 * MIB]
TRANSPORTS = {
    "all that one host offers": {},
    "sockets": {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_IB_DISABLE": "1"},
}


def measure(rank: int, transport: str, work: str, rounds: int, budget: float) -> None:
    """Run all sizes in one rank; rank 0 writes a line of JSON for each."""
    begin = time.monotonic()
    os.environ |= {"HFREDUCE_NODE": str(rank), **TRANSPORTS[transport]}
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    torch.cuda.set_device(rank)
    shared: Any = dist.FileStore(f"{work}/store", 2)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=2)
    ways: dict[str, Way] = {}
    for nbytes in PIECES:
        reducer = hfreduce.HierarchicalReducer(
            shared, rank, 2, timeout=30, network="nccl", piece_bytes=nbytes, name=str(nbytes)
        )
        ways[f"hfreduce, nccl, pieces of {nbytes // MIB} MiB"] = reducer.all_reduce
    ways["hfreduce, tcp"] = hfreduce.HierarchicalReducer(
        shared, rank, 2, timeout=30, name="tcp"
    ).all_reduce
    ways[BASELINE] = lambda tensor: dist.all_reduce(tensor)
    order = list(ways)
    for size in SIZES:
        tensor = torch.empty(size // 4)
        for name, way in ways.items():
            tensor.fill_(rank + 1)
            way(tensor)
            if not bool((tensor == 3).all()):
                raise RuntimeError(f"{name} adds wrongly: {size} bytes")
        calls = max(1, min(20, 8 * MIB // size))
        seconds = torch.zeros(len(ways), rounds, dtype=torch.float64)
        done = 0
        for turn in range(rounds):
            late = torch.tensor([float(time.monotonic() - begin > budget)])
            dist.all_reduce(late)
            if late.item() and turn:
                break
            for at in range(len(order)):
                name = order[(at + turn) % len(order)]
                tensor.zero_()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    ways[name](tensor)
                seconds[order.index(name), turn] = (time.perf_counter() - start) / calls
            done = turn + 1
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if rank == 0:
            times = {n: row[:done] for n, row in zip(order, seconds.tolist(), strict=True)}
            row = {"transport": transport} | case(2, 2, size, calls, times)
            shown = [f"{e['name']} {size / 2**30 / e['median_ms'] * 1e3:.2f}" for e in row["rows"]]
            click.echo(f"{transport}, {size / MIB:g} MiB, GiB/s: " + " · ".join(shown))
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps(row) + "\n")
    dist.barrier()
    time.sleep(0.2)
    os._exit(0)  # groups of torch's are not dropped right after a collective


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--budget", default=15.0, show_default=True, help="Seconds for each transport.")
@click.option("--commit", default="", help="What is measured, where git does not know.")
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(rounds: int, budget: float, commit: str, out: Path | None) -> None:
    """Measure all-reduces of host tensors between two ranks that have a GPU each."""
    if torch.cuda.device_count() < 2:
        click.echo("allreduce_nccl.py: needs two GPUs, NCCL takes one for each rank", err=True)
        sys.exit(1)
    gpu = torch.device("cuda", 0)
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(gpu),
        "versions": machine.versions(gpu),
        "commit": commit or machine.commit(),
        "date": machine.now(),
        "command": f"python benchmarks/allreduce_nccl.py --rounds {rounds} --budget {budget:g}",
        "complete": True,
        "cases": [],
    }
    for transport in TRANSPORTS:
        with tempfile.TemporaryDirectory() as work:
            start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
            start(measure, (transport, work, rounds, budget), nprocs=2)
            lines = Path(work, "cases").read_text().splitlines()
            result["cases"] += [json.loads(line) for line in lines]
    if str(out) != "-":
        directory = machine.ROOT / "benchmarks" / "results" / result["machine"]["slug"]
        path = out or directory / "allreduce_nccl.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
