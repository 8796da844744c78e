"""What opening a set of 5 million records costs: time, and memory a record.

    python benchmarks/opening.py                         # writes benchmarks/results/opening.json

A file of 5 million records of 16 bytes (60 MB of tables, all checked when it is opened), hot. Each
turn is a process of its own, which imports the reader, opens the file and reads one record. Memory:
what stays resident after that, over what was before opening. array_record takes part where it is
installed.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

import click
import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import machine, result, ways
from ffrecord import format as ffr

N, SIZE = 5_000_000, 16

MEASURE = """
import json, sys, time
{imports}
def resident():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS")) * 1024
before, start = resident(), time.perf_counter()
reader = {opening}
opened = time.perf_counter() - start
{reading}
print(json.dumps([opened, time.perf_counter() - start, (resident() - before) / {n}]))
"""


def program(path: Path, tables: str, check: bool) -> str:
    """Return the program that opens a record file."""
    return MEASURE.format(
        imports="from ffrecord import FileReader",
        opening=f"FileReader({str(path)!r}, {check}, tables={tables!r})",
        reading="reader.read([4_000_000, 1])",
        n=N,
    )


def array_record_program(path: Path) -> str:
    """Return the program that opens the same records in an array_record file."""
    return MEASURE.format(
        imports="from array_record.python import array_record_module as m",
        opening=f"m.ArrayRecordReader({str(path)!r}, options='readahead_buffer_size:0')",
        reading="reader.num_records(); reader.read([4_000_000, 1])",
        n=N,
    )


def write(path: Path) -> None:
    """Write the file at once; a header is checked like any other's."""
    record = bytes(SIZE)
    checksums = np.full(N, zlib.crc32(record), np.uint32)
    header = ffr.encode_header(checksums, np.full(N, SIZE, np.int64), ffr.tables_end(N))
    path.write_bytes(header + bytes(N * SIZE))


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "opening.json",
    help="The result file, or - for none.",
)
def main(rounds: int, out: Path) -> None:
    """Measure opening."""
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "many.ffr"
        write(path)
        programs = {
            "ffrecord, tables on demand": program(path, "demand", True),
            "ffrecord, tables in memory": program(path, "memory", True),
            "ffrecord, header's checksum not compared": program(path, "demand", False),
        }
        absent = {}
        if importlib.util.find_spec("array_record") is None:
            absent["array_record"] = "not installed"
        else:
            from array_record.python import array_record_module

            other = Path(work) / "many.array_record"
            writer = array_record_module.ArrayRecordWriter(str(other), "group_size:1,uncompressed")
            for _ in range(N):
                writer.write(bytes(SIZE))
            writer.close()
            programs["array_record"] = array_record_program(other)
        made = ways.document(
            "opening.py", "Opening 5 million records", [], ("array_record",), absent
        )
        kept: dict[tuple[str, int], list[float]] = {}

        def run(way: str, turn: int) -> list[float]:
            if (way, turn) not in kept:
                done = subprocess.run(
                    [sys.executable, "-c", programs[way]], capture_output=True, check=True
                )
                kept[way, turn] = json.loads(done.stdout)
            return kept[way, turn]

        for number, (name, unit, factor) in enumerate(
            [
                ("5 million records: open", "ms", 1e3),
                ("5 million records: open and read two", "ms", 1e3),
                ("5 million records: memory", "bytes a record", 1.0),
            ]
        ):
            functions = {
                way: (lambda turn, way=way, n=number, f=factor: run(way, turn)[n] * f)
                for way in programs
            }
            made["cases"].append(
                ways.in_turn(
                    name, unit, functions, rounds, None, lower_is_better=True, say=click.echo
                )
            )
        made["complete"] = True
        if str(out) != "-":
            result.write(out, made)


if __name__ == "__main__":
    main()
