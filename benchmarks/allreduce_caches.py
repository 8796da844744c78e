"""What handing cache lines on costs the cores that add, and what it gives the copies, on a GPU.

    python benchmarks/allreduce_caches.py            # 2 ranks, on one GPU or on two; 20 seconds

All settings live at once and are asked in turn, round after round, another one first each time. Of
each: the time of an all-reduce among several in a row, and by the trace how long a piece of 64 KiB
was being added, how long a chunk waited for its sum, and how long its copy back took. "sums": lines
of sums are handed on to the cache that all cores share; "shared": those of what they were added
from too; "size", the default: one or the other by the size of the call; "core": none. Ranks that
share a GPU share its link: then the copies bound the rate.
"""

from __future__ import annotations

import itertools
import json
import os
import statistics
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
from benchmarks.harness import machine

MIB = 1 << 20
SIZES = (25, 64, 186, 1024)  # MiB
SETTINGS = [("size", 6), ("shared", 6), ("sums", 6), ("core", 6), ("size", 4), ("size", 8)]
# What is read from the trace: a name, and between which stages.
STEPS = {
    "piece_us": ("adding", "added"),
    "sum_us": ("gathered", "combined"),
    "back_us": ("gone", "returned"),
}
Notes = list[tuple[int, str, int, int]]


def measure(
    rank: int, ranks: int, work: str, rounds: int, budget: float, sizes: tuple[int, ...]
) -> None:
    """Run all sizes in one rank; rank 0 writes a line of JSON for each."""
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    store: Any = dist.FileStore(f"{work}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    paths = {}
    for caches, threads in SETTINGS:
        os.environ["HFREDUCE_CACHES"] = caches
        name = f"{caches}, {threads} threads"
        reducer = hfreduce.Reducer(store, rank, ranks, timeout=20, name=name)
        paths[name] = reducer, reducer.gpu(gpu, threads=threads)
    begin = time.monotonic()
    for mib in sizes:
        tensor = torch.zeros(mib * MIB // 4, device=gpu)
        calls = max(2, min(20, 512 // mib))
        found: dict[str, list[dict[str, float]]] = {name: [] for name in paths}
        for turn in range(-1, rounds):  # the first is not counted
            late = torch.tensor([float(time.monotonic() - begin > budget)])
            dist.all_reduce(late)
            if late.item() and turn > 0:
                break
            names = list(paths)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                reducer, path = paths[name]
                path.trace()
                reducer.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    path.all_reduce(tensor, "sum").wait()
                torch.cuda.synchronize()
                seconds = (time.perf_counter() - start) / calls
                time.sleep(0.002)  # the host may be behind
                row = {"ms": seconds * 1e3, **steps(path.trace())}
                every: list[Any] = [None] * ranks
                dist.all_gather_object(every, row)
                if turn >= 0:
                    found[name].append({key: max(each[key] for each in every) for key in row})
        if rank == 0:
            rows = []
            for name, turns in found.items():
                columns = {key: [round(turn[key], 4) for turn in turns] for key in turns[0]}
                middle = {key: statistics.median(values) for key, values in columns.items()}
                shown = " ".join(f"{key} {value:.1f}" for key, value in middle.items())
                rate = mib / 1024 / middle["ms"] * 1e3
                click.echo(f"{mib} MiB, {name}: {rate:.1f} GiB/s, {shown}")
                rows.append({"name": name, **columns})
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps({"mib": mib, "calls": calls, "rows": rows}) + "\n")
    dist.barrier()
    os._exit(0)  # groups of torch's are not dropped right after a collective


def steps(notes: Notes) -> dict[str, float]:
    """Return the medians of `STEPS`, of those of a thread between two of its own notes."""
    taken: dict[str, list[float]] = {name: [] for name in STEPS}
    at: dict[tuple[int, str], int] = {}
    last: dict[int, tuple[int, str]] = {}
    for time_, stage, chunk, lane in sorted(notes):
        if stage == "adding":
            last[lane] = time_, stage
        elif stage == "added":
            taken["piece_us"].append((time_ - last[lane][0]) / 1e3)
        else:
            at[chunk, stage] = time_
    for name, (first, second) in itertools.islice(STEPS.items(), 1, None):
        for (chunk, stage), begun in at.items():
            if stage == first and (chunk, second) in at:
                taken[name].append((at[chunk, second] - begun) / 1e3)
    return {name: statistics.median(values or [0.0]) for name, values in taken.items()}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ranks", default=2, show_default=True)
@click.option("--mib", multiple=True, type=click.IntRange(1), default=SIZES, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--budget", default=12.0, show_default=True, help="Seconds for all sizes.")
@click.option("--commit", default="", help="What is measured, where git does not know.")
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(
    ranks: int, mib: tuple[int, ...], rounds: int, budget: float, commit: str, out: Path | None
) -> None:
    """Measure all-reduces of GPU tensors by where cache lines are left and by threads."""
    if not torch.cuda.is_available():
        click.echo("allreduce_caches.py: needs a GPU, and there is none", err=True)
        sys.exit(1)
    os.environ["HFREDUCE_TRACE"] = "1"
    gpu = torch.device("cuda", 0)
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(gpu),
        "versions": machine.versions(gpu),
        "commit": commit or machine.commit(),
        "date": machine.now(),
        "command": f"python benchmarks/allreduce_caches.py --ranks {ranks} --rounds {rounds} "
        f"--budget {budget:g} " + " ".join(f"--mib {size}" for size in mib),
        "gpus": torch.cuda.device_count(),
        "processors": os.cpu_count(),
        "complete": True,
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as work:
        start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
        start(measure, (ranks, work, rounds, budget, mib), nprocs=ranks)
        lines = Path(work, "cases").read_text().splitlines()
        result["cases"] += [json.loads(line) for line in lines]
    result["complete"] = all(
        len(row["ms"]) == rounds for case in result["cases"] for row in case["rows"]
    )
    if str(out) != "-":
        directory = machine.ROOT / "benchmarks" / "results" / result["machine"]["slug"]
        path = out or directory / "allreduce_caches.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
