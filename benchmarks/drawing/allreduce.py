"""The table of benchmarks/allreduce.py."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.drawing.results import Result

MIB = 1 << 20


def table(result: Result) -> str:
    """Return times and ratios to gloo, a row for each number of ranks, type and size."""
    lines = [
        "| ranks | type | size | gloo | hfreduce | as backend | Reducer |",
        "|--:|---|--:|--:|--:|---|---|",
    ]
    for case in result.measured:
        rows = {row["name"]: row for row in case["rows"]}
        lines.append(
            f"| {case['ranks']} | {case['dtype']} | {size(case['bytes'])} "
            f"| {time(rows['gloo'])} | {time(rows['Reducer'])} "
            f"| {ratio(rows['backend'])} | {ratio(rows['Reducer'])} |"
        )
    note = (
        "Time of one all-reduce, median of the rounds; ratio to gloo, round by round: median "
        "(lowest to highest). hfreduce's time is the Reducer's."
    )
    load = result.data.get("load_before", 0)
    cores = result.machine["cores"]
    if load > cores / 2:
        note += f" The {cores} cores had other work too: a load of {load} before the first round."
    return "\n".join([*lines, "", note, "", result.provenance()])


def size(count: int) -> str:
    """Return a number of bytes in KiB or MiB."""
    return f"{count >> 10} KiB" if count < MIB else f"{count >> 20} MiB"


def time(row: Mapping[str, Any]) -> str:
    """Return a median with its unit."""
    micros = float(row["median_us"])
    return f"{micros:.0f} µs" if micros < 1000 else f"{micros / 1000:.1f} ms"


def ratio(row: Mapping[str, Any]) -> str:
    """Return a ratio with its spread."""
    low, high = row["ratio_range"]
    return f"**{row['ratio_median']:.1f}×** ({low:.1f} to {high:.1f})"
