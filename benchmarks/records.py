"""How fast random batches are read: ffrecord's engines, the original's way, a plain pread loop.

    python benchmarks/records.py                         # writes benchmarks/results/records.json
    python benchmarks/records.py --rounds 2 --out -      # a quick look

Two files: records of about 48 KB and of about 4 KB. Each round reads the same random batches by
every reader in turn, starting with another one each round; cold: the file's pages are dropped from
the page cache before each reader. A ratio is taken round by round, against the plain loop. The
original's way waits in io_submit, ten times as long a record in some minutes as in others on a
machine that does other work: compare with it on an idle one only.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import machine
from benchmarks.libaio import LibaioReader
from ffrecord import FileReader, FileWriter

# name, records, mean size in bytes, records a batch
PROFILES = [("48 KB", 10_000, 48_000, 256), ("4 KB", 100_000, 4_000, 512)]
ENGINES = ("direct", "io_uring", "threads", "python")
BASELINE = "pread loop, no checksums"
Read = Callable[[list[int]], object]


def make(path: Path, count: int, mean: int) -> None:
    """Write a file of records with lognormal sizes, filled with random bytes."""
    source = random.Random(1)
    noise = memoryview(os.urandom(mean * 20))
    with FileWriter(path) as writer:
        for _ in range(count):
            size = min(int(mean * source.lognormvariate(-0.125, 0.5)), mean * 10)
            start = source.randrange(len(noise) - size)
            writer.write_one(noise[start : start + size])


def drop(path: Path) -> None:
    """Drop a file's pages from the page cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def plain(path: Path) -> Read:
    """Return a loop of `os.pread`, without checksums."""
    descriptor = os.open(path, os.O_RDONLY)
    with FileReader(path) as reader:
        offsets = reader.get_offsets(0).tolist()
    return lambda batch: [
        os.pread(descriptor, offsets[i + 1] - offsets[i], offsets[i]) for i in batch
    ]


def readers(path: Path, hot: bool) -> dict[str, Read]:
    """Return every way to read the file; all but the plain loop check checksums."""
    found: dict[str, Read] = {}
    for engine in ENGINES:
        if not (hot and engine == "direct"):
            found[engine] = FileReader(path, engine=engine).read
    found["original's way"] = LibaioReader(path, check_data=True).read
    found[BASELINE] = plain(path)
    return found


def measure(path: Path, hot: bool, size: int, rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Return a row a reader: records a second and CPU a record, each round, and the ratios."""
    ways = readers(path, hot)
    names = list(ways)
    rates: dict[str, list[float]] = {name: [] for name in names}
    costs: dict[str, list[float]] = {name: [] for name in names}
    with FileReader(path) as reader:
        count = reader.n
        if hot:
            for _ in reader:
                pass
    for turn in range(rounds):
        order = random.Random(turn).sample(range(count), count)
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            if not hot:
                drop(path)
            done, cpu, start = 0, time.process_time(), time.perf_counter()
            while done < count and time.perf_counter() - start < seconds:
                batch = order[done : done + size]
                ways[name](batch)
                done += len(batch)
            elapsed = time.perf_counter() - start
            rates[name].append(done / elapsed)
            costs[name].append((time.process_time() - cpu) / done * 1e6)
    rows = []
    for name in names:
        ratios = [a / b for a, b in zip(rates[name], rates[BASELINE], strict=True)]
        rows.append(
            {
                "reader": name,
                "records_per_second": [round(rate) for rate in rates[name]],
                "median": round(statistics.median(rates[name])),
                "cpu_us_per_record": round(statistics.median(costs[name]), 1),
                "ratio_median": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        )
    return rows


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=float, default=1.0, show_default=True, help="Of a reader's turn.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Where files are made.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "records.json",
    help="The result file, or - for none.",
)
def main(rounds: int, seconds: float, directory: str | None, out: Path) -> None:
    """Measure random batches, cold and hot."""
    import torch

    cpu = torch.device("cpu")
    result: dict[str, Any] = {
        "machine": machine.describe(cpu),
        "versions": machine.versions(cpu),
        "commit": machine.commit(),
        "date": machine.now(),
        "command": f"python benchmarks/records.py --rounds {rounds} --seconds {seconds:g}",
        "cases": [],
    }
    with tempfile.TemporaryDirectory(dir=directory) as work:
        for profile, count, mean, size in PROFILES:
            path = Path(work) / "records.ffr"
            make(path, count, mean)
            for hot in (False, True):
                rows = measure(path, hot, size, rounds, seconds)
                temperature = "hot" if hot else "cold"
                result["cases"].append({"profile": profile, "cache": temperature, "rows": rows})
                click.echo(f"\n{profile}, {temperature}, batches of {size}")
                for row in rows:
                    low, high = row["ratio_range"]
                    click.echo(
                        f"  {row['reader']:<26}{row['median']:>9}/s"
                        f"{row['cpu_us_per_record']:>8} µs CPU"
                        f"{row['ratio_median']:>7} x ({low} to {high})"
                    )
            path.unlink()
    if str(out) != "-":
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
