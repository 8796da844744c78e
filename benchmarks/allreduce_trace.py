"""Where the time of an all-reduce on GPUs goes: when each chunk passes each stage.

    python benchmarks/allreduce_trace.py                          # 2 ranks, 25 MiB
    python benchmarks/allreduce_trace.py --ranks 1 --mib 186 --threads 6 --slots 8 --timeline

Prints, for each setting, the rate and of each step between two stages the median and the longest
time in µs over all chunks; with --timeline one call chunk by chunk, in µs since it began.
"""

from __future__ import annotations

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

import itertools

import hfreduce
from hfreduce.cuda import STAGES

MIB = 1 << 20
Notes = list[tuple[int, str, int, int]]
Settings = dict[str, Any]


def rank_of(
    rank: int, ranks: int, work: str, mib: float, calls: int, tries: list[Settings]
) -> None:
    """Trace all settings in one rank; rank 0 gathers what the others noted, and prints."""
    torch.set_num_threads(1)
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    store: Any = dist.FileStore(f"{work}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    tensor = torch.zeros(int(mib * MIB) // 4, device=gpu)
    for settings in tries:
        timeline = bool(settings.pop("timeline", 0))
        reducer = hfreduce.Reducer(store, rank, ranks, timeout=20)
        path = reducer.gpu(gpu, **settings)
        for _ in range(3):
            path.all_reduce(tensor, "sum").wait()
        torch.cuda.synchronize()
        rows, took = [], []
        for _ in range(calls):
            time.sleep(0.02)
            path.trace()
            reducer.barrier()
            start = time.monotonic_ns()
            path.all_reduce(tensor, "sum").wait()
            enqueued = time.monotonic_ns()
            torch.cuda.synchronize()
            end = time.monotonic_ns()
            time.sleep(0.002)  # the host may be behind
            rows.append((start, enqueued, path.trace()))
            took.append(end - start)
        everyone: list[Any] = [None] * ranks
        dist.all_gather_object(everyone, (rows, took))
        if rank == 0:
            report(settings, mib, everyone, timeline)
        reducer.close()
    os._exit(0)


def report(settings: Settings, mib: float, everyone: list[Any], timeline: bool) -> None:
    """Print what the ranks noted."""
    times = [max(took[i] for _, took in everyone) / 1e3 for i in range(len(everyone[0][1]))]
    middle = statistics.median(times)
    click.echo(
        f"## {settings} {mib:g} MiB: {middle:.0f} µs ({min(times):.0f} to {max(times):.0f}), "
        f"{mib / 1024 / middle * 1e6:.1f} GiB/s"
    )
    for rank, (rows, _) in enumerate(everyone):
        steps: dict[str, list[float]] = {}
        for start, enqueued, notes in rows:
            steps.setdefault("enqueue", []).append((enqueued - start) / 1e3)
            chunks = by_chunk(notes)
            for chunk in chunks.values():
                for a, b in itertools.pairwise(STAGES):
                    if a in chunk and b in chunk:
                        steps.setdefault(b, []).append((chunk[b] - chunk[a]) / 1e3)
                if "adding last" in chunk:
                    lag = (chunk["adding last"] - chunk["gathered"]) / 1e3
                    steps.setdefault("last adding", []).append(lag)
            for stage in ("arrived", "returned"):
                at = sorted(chunk[stage] for chunk in chunks.values() if stage in chunk)
                gaps = [(b - a) / 1e3 for a, b in itertools.pairwise(at)]
                steps.setdefault(f"between {stage}", []).extend(gaps)
        line = " ".join(
            f"{name} {statistics.median(values):.0f}/{max(values):.0f}"
            for name, values in steps.items()
            if values
        )
        click.echo(f"   rank {rank}: {line}")
        if timeline:
            start, enqueued, notes = rows[len(rows) // 2]
            click.echo(f"   enqueued {(enqueued - start) / 1e3:.0f}")
            for number, chunk in sorted(by_chunk(notes).items()):
                seen = " ".join(f"{name} {(at - start) / 1e3:.0f}" for name, at in chunk.items())
                click.echo(f"   {number}: {seen}")


def by_chunk(notes: Notes) -> dict[int, dict[str, int]]:
    """Return of each chunk when it passed each stage: the first thread begins, the last ends."""
    chunks: dict[int, dict[str, int]] = {}
    for at, stage, number, _ in sorted(notes):
        chunk = chunks.setdefault(number, {})
        if stage == "adding":
            chunk.setdefault(stage, at)
            chunk["adding last"] = at
        else:
            chunk[stage] = at
    return chunks


@click.command()
@click.option("--ranks", default=2, help="Processes; they share GPUs where there are fewer.")
@click.option("--mib", default=25.0, help="MiB of the tensor, fp32.")
@click.option("--calls", default=15, help="Calls a setting, each by itself.")
@click.option("--threads", multiple=True, type=int, help="That add; several are tried in turn.")
@click.option("--chunk", multiple=True, type=int, help="KiB of a chunk, at most.")
@click.option("--slots", multiple=True, type=int, help="Chunks under way.")
@click.option("--timeline", is_flag=True, help="Print one call of each setting.")
def main(
    ranks: int,
    mib: float,
    calls: int,
    threads: tuple[int, ...],
    chunk: tuple[int, ...],
    slots: tuple[int, ...],
    timeline: bool,
) -> None:
    """Trace all-reduces on GPUs."""
    os.environ["HFREDUCE_TRACE"] = "1"
    tries = [
        {
            name: value
            for name, value in (("threads", t), ("chunk_bytes", c * 1024), ("slots", s))
            if value
        }
        | ({"timeline": 1} if timeline else {})
        for t in threads or (0,)
        for c in chunk or (0,)
        for s in slots or (0,)
    ]
    with tempfile.TemporaryDirectory() as work:
        context: Any = multiprocessing.get_context("spawn")
        processes = [
            context.Process(target=rank_of, args=(rank, ranks, work, mib, calls, tries))
            for rank in range(ranks)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        sys.exit(max(process.exitcode for process in processes))


if __name__ == "__main__":
    main()
