"""What moving a checkpoint's bytes costs, call by call: plain, hashed by Python, hashed natively.

    python benchmarks/checkpoint_calls.py          # writes …/results/checkpoint_calls.json

One thread writes a file from memory, flushes it, and reads it back into the same memory, in
segments of 32 MiB: by nothing but system calls; by Python's way, which hashes a segment before it
writes it and behind its reading; and by the native part, with what `save` does (blocks reserved, an
early start of the disk) and with what `save_async` does (past the page cache). Reads come from the
page cache. Before a write as much memory is filled and freed; see checkpoint.py.

In memory (tmpfs), where `save` and `save_async` take huge pages or small ones, whichever are
quicker, each is a way of its own, and files of both are read.
"""

from __future__ import annotations

import functools
import mmap
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.checkpoint import warm
from benchmarks.harness import machine, result, ways
from hfai.checkpoint.format import CHUNK, digest
from hfai.checkpoint.storage import Run, local_files
from hfai.checkpoint.storage.local_files import LocalFile, LocalSink

SEGMENT = 32 << 20
PLAIN = "the system calls alone"
PYTHON, SAVE, BESIDE = (
    "hashed, Python",
    "hashed, native (save)",
    "hashed, native, direct (save_async)",
)
NATIVE = "hashed, native"
SMALL_PAGES, HUGE_PAGES = "hashed, native, 4 KiB pages", "hashed, native, huge pages"
PLAIN_HUGE = "the system calls alone, of huge pages"


class Bench:
    """A file and the memory that it is written from and read into.

    Args:
        path: Of the file.
        size: Its bytes, whole segments.
    """

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.huge = path.with_suffix(".huge")
        self.memory = memoryview(mmap.mmap(-1, size))
        block = os.urandom(CHUNK)
        for at in range(0, size, CHUNK):
            self.memory[at : at + CHUNK] = block
        self.segments = range(0, size, SEGMENT)
        self.hashes = digest(block) * (SEGMENT // CHUNK)
        self.seconds: dict[tuple[str, str], tuple[float, float]] = {}

    def chunks(self, at: int) -> list[memoryview]:
        """Return the chunks of a segment."""
        return [self.memory[one : one + CHUNK] for one in range(at, at + SEGMENT, CHUNK)]

    def write(self, way: str) -> None:
        """Write the file and flush it."""
        native = local_files.native
        if way in (SMALL_PAGES, HUGE_PAGES):
            native.force_huge_pages(way == HUGE_PAGES)
        if way == PYTHON:
            local_files.native = None
        path = self.huge if way == HUGE_PAGES else self.path
        try:
            sink = LocalSink(path, 0 if way == PLAIN else self.size, way == BESIDE)
            for at in self.segments:
                if way == PLAIN:
                    sink.write(at, [self.memory[at : at + SEGMENT]])
                else:
                    sink.write_hashed(at, self.chunks(at))
            sink.close()
        finally:
            local_files.native = native
            native.force_huge_pages(None)

    def read(self, way: str) -> None:
        """Read the file."""
        native = local_files.native
        if way == PYTHON:
            local_files.native = None
        try:
            file = LocalFile(self.huge if way in (PLAIN_HUGE, HUGE_PAGES) else self.path)
            for at in self.segments:
                view = self.memory[at : at + SEGMENT]
                if way in (PLAIN, PLAIN_HUGE):
                    file.read_into(at, [view])
                elif file.read_runs([Run(at, view, self.hashes)], CHUNK) is not None:
                    raise RuntimeError("what is read is not what was written")
            file.close()
        finally:
            local_files.native = native

    def timed(self, call: Callable[[str], None], way: str, writes: bool) -> tuple[float, float]:
        """Return GB a second, and GB a second of a core."""
        if writes:
            self.path.unlink(missing_ok=True)
            self.huge.unlink(missing_ok=True)
            warm(self.size)
        start, used = time.perf_counter(), time.process_time()
        call(way)
        took, cost = time.perf_counter() - start, time.process_time() - used
        return self.size / 1e9 / took, self.size / 1e9 / cost


@click.command()
@click.option("--gigabytes", type=click.FloatRange(0.1), default=1.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "checkpoint_calls.json",
    help="The result file, or - for none.",
)
def main(gigabytes: float, rounds: int, out: Path) -> None:
    """Measure the calls."""
    arguments = ["--gigabytes", f"{gigabytes:g}", "--rounds", str(rounds)]
    if local_files.native is None:
        raise click.UsageError("the native part was not built")
    made = ways.document(
        "checkpoint_calls.py", "Moving a checkpoint's bytes", arguments, ("xxhash",), {}
    )
    size = max(1, round(gigabytes * 1e9 / SEGMENT)) * SEGMENT
    shm = "/dev/shm" if os.path.isdir("/dev/shm") else None
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir=shm) as memory:
        for place, label, writes, reads in (
            (
                memory,
                "in memory (tmpfs)",
                (PLAIN, PYTHON, SMALL_PAGES, HUGE_PAGES),
                (PLAIN, PYTHON, NATIVE, PLAIN_HUGE, HUGE_PAGES),
            ),
            (disk, "on a disk", (PLAIN, PYTHON, SAVE, BESIDE), (PLAIN, PYTHON, NATIVE)),
        ):
            bench = Bench(Path(place, "file"), size)
            for what, call, names in (
                ("write and flush", bench.write, writes),
                ("read", bench.read, reads),
            ):
                if what == "read":
                    bench.write(PLAIN)
                    if HUGE_PAGES in reads:
                        bench.write(HUGE_PAGES)
                figures: list[dict[str, list[float]]] = [{}, {}]
                for turn in range(rounds):
                    for at in range(len(names)):
                        way = names[(turn + at) % len(names)]
                        found = bench.timed(call, way, what != "read")
                        for rows, figure in zip(figures, found, strict=True):
                            rows.setdefault(way, []).append(figure)
                add: Any = functools.partial(ways.as_case, baseline=PLAIN, say=click.echo)
                for unit, rows in zip(("GB/s", "GB per second of a core"), figures, strict=True):
                    made["cases"].append(add(f"{what}, {label}", unit, rows))
    made["complete"] = True
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    main()
