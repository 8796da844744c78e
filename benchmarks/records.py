"""How fast random batches are read: ffrecord, its engines, other formats, the original's way.

    python benchmarks/records.py                         # writes benchmarks/results/records.json
    python benchmarks/records.py --rounds 2 --out -      # a quick look

Peers take part where they are installed, best in an environment of their own: pip install
array_record bagz pylance lmdb mosaicml-streaming litdata webdataset tfrecord

Two profiles, records of about 48 KB in batches of 256 and of about 4 KB in batches of 512; the same
records in every format, the same batches for all in a round, each round starting with another way.
A turn is over after --seconds or a quarter of the records, so that no way profits from what its own
reads have fetched besides. Every turn is a process of its own, which opens its files and reads one
batch before its clock starts. Cold: the pages are dropped from the cache before (what stayed is
measured by mincore and kept in the result file). Hot: a fifth of the records, read before.

All ways of ffrecord and the original's compare checksums, others but TFRecord have none for a
record or check a block's. "The disk" is what Linux AIO gives past the cache at depth 64 in the same
round. CPU is of all threads of the process. The original's way waits for each record in io_submit;
on a machine that does other work that takes up to thirty times as long in some minutes as in
others, so ratios are over the plain loop, which waits for each record too.
"""

from __future__ import annotations

import functools
import gc
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks import disk
from benchmarks.formats import (
    FORMATS,
    MODULES,
    PACKAGES,
    Format,
    Read,
    Records,
    ffr,
    made,
    original,
    plain,
)
from benchmarks.harness import machine, result, ways

# name, records, mean size in bytes, records a batch
PROFILES = [("48 KB", 20_000, 48_000, 256), ("4 KB", 150_000, 4_000, 512)]
ORIGINAL, PLAIN, DISK = "the original's way", "pread loop, no checksums", "the disk"
UNCHECKED = "ffrecord, no checksums"
COLD_ENGINES = ("direct", "io_uring", "libaio", "threads", "python")
HOT_ENGINES = ("io_uring", "threads", "python")


class Way(NamedTuple):
    """One way to read a profile."""

    directory: Path
    open: Callable[[Path], AbstractContextManager[Any]]


class Turns:
    """Measures turns; remembers CPU and what was cached, which belong to the same turns.

    Args:
        count: Records of the profile.
        batch: Records of a batch.
        seconds: The longest turn.
        hot: Read what was read before; otherwise nothing is in the page cache.
    """

    def __init__(self, count: int, batch: int, seconds: float, hot: bool) -> None:
        self._count, self._batch, self._seconds, self._hot = count, batch, seconds, hot
        self.cpu: dict[str, list[float]] = {}
        self.cached: dict[str, list[float]] = {}

    def measure(self, name: str, way: Way) -> ways.Measure:
        """Return a function that measures a turn of a way: records a second."""

        def turn(number: int) -> float:
            chosen = random.Random(number)
            pool = range(self._count // 5) if self._hot else range(self._count)
            order = chosen.sample(pool, len(pool) if self._hot else self._count // 4)
            rate, cpu, cached = apart(lambda: self._turn(way, order))
            self.cpu.setdefault(name, []).append(cpu)
            self.cached.setdefault(name, []).append(cached)
            return float(rate)

        return turn

    def _turn(self, way: Way, order: list[int]) -> list[float]:
        """Return records a second, µs of CPU a record, and the share of the files cached before."""
        if not self._hot:
            disk.drop(way.directory)
        cached = disk.left(way.directory)
        with way.open(way.directory) as read:
            if self._hot:
                self._read_all(read, order)
            read(order[-self._batch :])
            gc.collect()
            return [*self._timed(read, order), cached]

    def _read_all(self, read: Read, order: list[int]) -> None:
        for first in range(0, len(order), self._batch):
            read(order[first : first + self._batch])

    def _timed(self, read: Read, order: list[int]) -> tuple[float, float]:
        """Return records a second, and µs of CPU a record."""
        done, place = 0, 0
        cpu, start = time.process_time(), time.perf_counter()
        while (elapsed := time.perf_counter() - start) < self._seconds:
            part = order[place : place + self._batch]
            read(part)
            done += len(part)
            place += self._batch
            if place >= len(order):
                if not self._hot:
                    elapsed = time.perf_counter() - start
                    break
                place = 0
        return done / elapsed, (time.process_time() - cpu) / done * 1e6


def measure_profile(
    name: str, count: int, mean: int, batch: int, root: Path, rounds: int, seconds: float,
    absent: dict[str, str],
) -> list[dict[str, Any]]:  # fmt: skip
    """Write a profile in every format, and return its cases."""
    records = made(count, mean)
    directories: dict[str, Path] = {}
    for label, kind in FORMATS.items():
        if label in absent:
            continue
        directory = root / f"{name} {label}".replace(" ", "_").replace(",", "")
        directory.mkdir()
        start = time.perf_counter()
        try:
            apart(functools.partial(write, kind, directory, records))
        except RuntimeError as error:
            absent[label] = str(error)
            click.echo(f"{label} does not take part: {absent[label]}", err=True)
            continue
        click.echo(f"{name}, {label}: written in {time.perf_counter() - start:.0f} s", err=True)
        directories[label] = directory
    cases = []
    ours = directories["ffrecord"]
    for hot in (False, True):
        turns = Turns(count, batch, seconds, hot)
        taking: dict[str, Way] = {}
        engines = HOT_ENGINES if hot else COLD_ENGINES
        for engine in engines:
            label = f"ffrecord, {engine}"
            taking[label] = Way(ours, ffr(engine))
        if hot:
            taking[UNCHECKED] = Way(ours, ffr("io_uring", check_data=False))
        taking[ORIGINAL], taking[PLAIN] = Way(ours, original), Way(ours, plain)
        for label, directory in directories.items():
            if label != "ffrecord":
                taking[label] = Way(directory, FORMATS[label].open)
        if not hot:
            taking[DISK] = Way(ours, lambda directory: disk.probe(directory / "records.ffr"))
        functions = {label: turns.measure(label, way) for label, way in taking.items()}
        title = f"{name}, {'hot' if hot else 'cold'}"
        case = ways.in_turn(title, "records a second", functions, rounds, PLAIN, say=click.echo)
        case["cached_before"] = {
            label: round(max(shares), 3) for label, shares in turns.cached.items()
        }
        cases += [
            case,
            processor(title, turns, taking),
            over_others(title, case, f"ffrecord, {engines[0]}"),
        ]
    return cases


def apart(work: Callable[[], Any]) -> Any:
    """Return what a forked process returns, so that no way is disturbed by another's libraries.

    Raises:
        RuntimeError: It failed.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = {"value": work()}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
        with os.fdopen(writing, "w") as file:
            json.dump(answer, file)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as file:
        text = file.read()
    os.waitpid(child, 0)
    answer = json.loads(text) if text else {"error": "the process was killed"}
    if "error" in answer:
        raise RuntimeError(answer["error"])
    return answer["value"]


def write(kind: Format, directory: Path, records: Records) -> None:
    """Write a profile in a format, and check some of it."""
    kind.write(directory, records)
    os.sync()
    with kind.open(directory) as read:
        check(read, list(range(3, 1000, 101)), records, kind.random)


def check(read: Read, indices: list[int], records: Any, is_random: bool) -> None:
    """Read a few records and compare them with what was written; of a stream only that it flows.

    Raises:
        ValueError: They differ.
    """
    found = read(indices)
    if len(found) != len(indices):
        raise ValueError(f"{len(found)} records for {len(indices)} indices")
    if not is_random:
        return
    wanted = dict.fromkeys(indices)
    for index, record in enumerate(records()):
        if index in wanted:
            wanted[index] = record
        if index > max(indices):
            break
    for index, record in zip(indices, found, strict=True):
        content = record.as_py() if hasattr(record, "as_py") else bytes(record)
        if content != wanted[index]:
            raise ValueError(f"record {index} is not what was written")


def processor(title: str, turns: Turns, taking: dict[str, Way]) -> dict[str, Any]:
    """Return the case of CPU a record, of the turns that were measured."""
    functions = {
        label: (lambda turn, label=label: turns.cpu[label][turn])
        for label in taking
        if label != DISK
    }
    rounds = len(turns.cpu[ORIGINAL])
    return ways.in_turn(
        title, "µs of CPU a record", functions, rounds, PLAIN, lower_is_better=True,
        say=lambda line: None,
    )  # fmt: skip


def over_others(title: str, case: dict[str, Any], ours: str) -> dict[str, Any]:
    """Return the case of our rate over that of every other way, round by round."""
    rates = {row["way"]: np.array(row["rounds"]) for row in case["rows"]}
    rows = []
    for way, theirs in rates.items():
        if way != ours:
            ratios = (rates[ours] / theirs).tolist()
            rows.append(
                {
                    "way": way,
                    "rounds": [float(f"{ratio:.4g}") for ratio in ratios],
                    "median": float(f"{statistics.median(ratios):.4g}"),
                    "ratios": [],
                }
            )
    return {
        "name": title, "unit": f"{ours}: times as fast as", "baseline": None,
        "lower_is_better": False, "skipped": "", "rows": rows,
    }  # fmt: skip


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Of a turn.")
@click.option("--profile", type=click.Choice([name for name, *_ in PROFILES]), multiple=True)
@click.option("--peers/--no-peers", default=True, help="Other formats take part.  [default: yes]")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Where files are made.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "records.json",
    help="The result file, or - for none.",
)
def main(
    rounds: int, seconds: float, profile: tuple[str, ...], peers: bool, directory: str | None,
    out: Path,
) -> None:  # fmt: skip
    """Measure random batches, cold and hot."""
    # glibc keeps freed memory once it has seen a large block freed; the ways that allocate a block
    # a record gain most from that, and a process that loads data has seen one.
    np.ones(31 << 20, np.uint8)
    absent = {
        label: "not installed"
        for label, module in MODULES.items()
        if importlib.util.find_spec(module) is None
    }
    if not peers:
        absent |= dict.fromkeys(list(FORMATS)[1:], "left out")
    arguments = (
        []
        if (rounds, seconds) == (5, 0.5)
        else ["--rounds", str(rounds), "--seconds", f"{seconds:g}"]
    )
    if not peers:
        arguments.append("--no-peers")
    made_result = ways.document(
        "records.py", "Random batches of records", arguments, PACKAGES, absent
    )
    made_result["absent"] = absent
    with tempfile.TemporaryDirectory(dir=directory) as work:
        for name, count, mean, batch in PROFILES:
            if profile and name not in profile:
                continue
            with tempfile.TemporaryDirectory(dir=work) as root:
                made_result["cases"] += measure_profile(
                    name, count, mean, batch, Path(root), rounds, seconds, absent
                )
            if str(out) != "-":
                result.write(out, made_result)
    made_result["complete"] = not profile
    if str(out) != "-":
        result.write(out, made_result)


if __name__ == "__main__":
    main()
