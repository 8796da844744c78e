"""How fast ranks of one machine add tensors: hfreduce against gloo in the same processes.

    python benchmarks/allreduce.py                                # the published table, 5 minutes
    python benchmarks/allreduce.py --ranks 2 --most 1 --rounds 3 --out -     # a quick look
    python benchmarks/allreduce.py --device cuda                  # GPUs (allreduce_cuda.py), 4 min

Every round times each way in turn, starting with another one each round, and a ratio is taken round
by round: other work on the machine then weighs on all. A round is a number of calls back to back
between barriers, and counts for the slowest rank. Before timing, each way's sum is checked.
"""

from __future__ import annotations

import json
import math
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

import hfreduce
from benchmarks import allreduce_cuda
from benchmarks.harness import machine

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
BYTES_A_ROUND = 16 * MIB  # of small tensors as many calls as make these
MOST_CALLS = 100
BASELINE = "gloo"
Way = Callable[[Tensor], object]


def measure(rank: int, ranks: int, work: str, cases: list[tuple[str, int]], rounds: int) -> None:
    """Run all cases in one rank; rank 0 writes a line of JSON for each."""
    torch.set_num_threads(1)
    shared: Any = dist.FileStore(f"{work}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks)
    group = dist.new_group(backend="hfreduce")
    reducer = hfreduce.Reducer(shared, rank, ranks, timeout=300)
    ways: dict[str, Way] = {
        "Reducer": lambda tensor: reducer.all_reduce(tensor),
        "backend": lambda tensor: dist.all_reduce(tensor, group=group),
        BASELINE: lambda tensor: dist.all_reduce(tensor),
    }
    for dtype, size in cases:
        tensor = torch.empty(size // DTYPES[dtype].itemsize, dtype=DTYPES[dtype])
        for name, way in ways.items():
            tensor.fill_(rank + 1)
            way(tensor)
            if not bool((tensor == ranks * (ranks + 1) / 2).all()):
                raise RuntimeError(f"{name} adds wrongly: {ranks} ranks, {dtype}, {size} bytes")
        calls = max(1, min(MOST_CALLS, BYTES_A_ROUND // size))
        times = torch.zeros(len(ways), rounds, dtype=torch.float64)
        names = list(ways)
        for turn in range(rounds):
            first = turn % len(names)
            for name in names[first:] + names[:first]:
                tensor.zero_()
                reducer.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    ways[name](tensor)
                times[names.index(name), turn] = (time.perf_counter() - start) / calls
        reducer.all_reduce(times, "max")
        if rank == 0:
            row = case(ranks, dtype, size, calls, dict(zip(names, times.tolist(), strict=True)))
            click.echo(summary(row))
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps(row) + "\n")
    reducer.barrier()
    dist.destroy_process_group()


def case(
    ranks: int, dtype: str, size: int, calls: int, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """Return what a result file says of a case."""
    rows = []
    for name, times in seconds.items():
        ratios = [b / a for a, b in zip(times, seconds[BASELINE], strict=True)]
        rows.append(
            {
                "name": name,
                "us": [round(second * 1e6, 2) for second in times],
                "median_us": round(statistics.median(times) * 1e6, 2),
                "gb_per_s": round(size / statistics.median(times) / 1e9, 3),
                "ratio_median": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        )
    return {"skipped": False, "ranks": ranks, "dtype": dtype, "bytes": size, "calls": calls} | {
        "rows": rows
    }


def summary(row: dict[str, Any]) -> str:
    """Return a line of text on a case."""
    shown = []
    for entry in row["rows"]:
        low, high = entry["ratio_range"]
        ratio = f" {entry['ratio_median']:.1f} x ({low:.1f} to {high:.1f})"
        shown.append(f"{entry['name']} {entry['median_us']:.1f} µs")
        shown[-1] += "" if entry["name"] == BASELINE else ratio
    size = f"{row['bytes'] // KIB} KiB" if row["bytes"] < MIB else f"{row['bytes'] // MIB} MiB"
    return f"{row['ranks']} ranks {row['dtype']} {size:>8}: " + " · ".join(shown)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True)
@click.option(
    "--ranks",
    "counts",
    type=click.IntRange(2),
    multiple=True,
    help="[default: 2 and 4; with cuda as many as GPUs, but 2]",
)
@click.option("--dtype", "dtypes", type=click.Choice(list(DTYPES)), multiple=True)
@click.option("--most", type=float, default=256, show_default=True, help="MiB of the largest.")
@click.option("--rounds", type=click.IntRange(1), help="[default: 9; with cuda 5]")
@click.option(
    "--budget",
    type=click.FloatRange(20),
    default=240,
    show_default=True,
    help="Seconds for each number of ranks, with cuda: what is not measured by then is left out.",
)
@click.option("--way", "ways", type=click.Choice(list(allreduce_cuda.WAYS)), multiple=True)
@click.option("--part", "parts", type=click.Choice(allreduce_cuda.PARTS), multiple=True)
@click.option("--commit", help="Recorded as the commit.  [default: the checked-out one]")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    help="The result file, or - for none.  [default: benchmarks/results/<machine>/…]",
)
def main(
    device: str,
    counts: tuple[int, ...],
    dtypes: tuple[str, ...],
    most: float,
    rounds: int | None,
    budget: float,
    ways: tuple[str, ...],
    parts: tuple[str, ...],
    commit: str | None,
    out: Path | None,
) -> None:
    """Measure all-reduces of CPU tensors, or of GPUs' (benchmarks/allreduce_cuda.py).

    --way and --part, with cuda, measure only these.
    """
    if device == "cuda":
        on_gpus(counts, rounds or 5, budget, ways, parts, commit, out)
    else:
        on_cpu(counts or (2, 4), dtypes, most, rounds or 9, commit, out)


def on_gpus(
    counts: tuple[int, ...],
    rounds: int,
    budget: float,
    ways: tuple[str, ...],
    parts: tuple[str, ...],
    commit: str | None,
    out: Path | None,
) -> None:
    """Measure one rank, then each number of ranks, on the GPUs there are."""
    if not torch.cuda.is_available():
        click.echo("allreduce.py: torch finds no CUDA device: use --device cpu", err=True)
        sys.exit(1)
    gpu = torch.device("cuda")
    count = torch.cuda.device_count()
    counts = counts or (max(2, count),)
    options = "".join(f" --ranks {ranks}" for ranks in counts) + f" --rounds {rounds}"
    options += "".join(f" --way {shlex.quote(way)}" for way in ways)
    options += "".join(f" --part {part}" for part in parts)
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(gpu) | {"gpus": count},
        "versions": machine.versions(gpu) | {"nccl": _nccl_version()},
        "commit": commit or machine.commit(),
        "date": machine.now(),
        "command": f"python benchmarks/allreduce.py --device cuda{options} --budget {budget:g}",
        "peer_access": count > 1
        and all(
            torch.cuda.can_device_access_peer(a, b)
            for a in range(count)
            for b in range(count)
            if a != b
        ),
        "NCCL_NVLS_ENABLE": os.environ.get("NCCL_NVLS_ENABLE", ""),
        "complete": True,
        "cases": [],
    }
    name = "allreduce_cuda" if count >= max(counts) else "allreduce_cuda_shared"
    for ranks in counts:
        allreduce_cuda.measure(
            result, lambda found: write(found, name, out), ranks, rounds, budget, ways, parts
        )


def _nccl_version() -> str:
    version: Any = torch.cuda.nccl.version
    return ".".join(map(str, version()))


def on_cpu(
    counts: tuple[int, ...],
    dtypes: tuple[str, ...],
    most: float,
    rounds: int,
    commit: str | None,
    out: Path | None,
) -> None:
    """Measure CPU tensors of all sizes and types for each number of ranks."""
    cpu = torch.device("cpu")
    chosen = dtypes or tuple(DTYPES)
    sizes = [size for size in SIZES if size <= most * MIB]
    command = f"python benchmarks/allreduce.py --rounds {rounds}"
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(cpu),
        "versions": machine.versions(cpu),
        "commit": commit or machine.commit(),
        "date": machine.now(),
        "command": command if not dtypes and counts == (2, 4) and most == 256 else "a part",
        "complete": not dtypes and counts == (2, 4) and most == 256,
        "load_before": round(os.getloadavg()[0], 1),
        "cases": [],
    }
    for ranks in counts:
        with tempfile.TemporaryDirectory() as work:
            cases = [(dtype, size) for dtype in chosen for size in sizes]
            start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
            start(measure, (ranks, work, cases, rounds), nprocs=ranks)
            lines = Path(work, "cases").read_text().splitlines()
            result["cases"] += [json.loads(line) for line in lines]
    worst = {
        name: min(
            entry["ratio_median"]
            for row in result["cases"]
            if small == (row["bytes"] <= MIB)
            for entry in row["rows"]
            if entry["name"] == "Reducer"
        )
        for name, small in (("up to 1 MiB", True), ("above", False))
        if any(small == (row["bytes"] <= MIB) for row in result["cases"])
    }
    for name, ratio in worst.items():
        click.echo(f"least ratio to gloo {name}: {math.floor(ratio * 10) / 10:.1f}")
    write(result, "allreduce_cpu", out)


def write(result: dict[str, Any], name: str, out: Path | None) -> None:
    """Write a result file: where it belongs, or where it is asked for."""
    if str(out) == "-":
        return
    slug = result["machine"]["slug"]
    out = out or machine.ROOT / "benchmarks" / "results" / slug / f"{name}.json"
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
