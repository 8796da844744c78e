"""Tables of what all-reduces of GPU tensors take from the host (allreduce_caches, _step)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from benchmarks.drawing.results import Result


def caches(result: Result) -> str:
    """Return a row for each size and setting."""
    lines = [
        "| size | lines handed on | GiB/s | a piece, µs | a chunk's sum, µs | copy back, µs |",
        "|--:|---|--:|--:|--:|--:|",
    ]
    for case in result.measured:
        for row in case["rows"]:
            rates = sorted(case["mib"] / 1024 / ms * 1e3 for ms in row["ms"])
            rate = f"{statistics.median(rates):.1f} ({rates[0]:.1f} to {rates[-1]:.1f})"
            steps = [
                f"{statistics.median(row[key]):.0f}" for key in ("piece_us", "sum_us", "back_us")
            ]
            lines.append(f"| {case['mib']} MiB | {row['name']} | {rate} | {' | '.join(steps)} |")
    gpus, cores = result.data["gpus"], result.data["processors"]
    note = (
        f"Size of the tensor (fp32) over the time of one all-reduce of several in a row: median "
        f"(lowest to highest round); medians of the trace. {gpus} GPU(s), {cores} cores."
    )
    return "\n".join([*lines, "", note, "", result.provenance()])


def step(result: Result) -> str:
    """Return a row for each way, its steps with averaging and without."""
    lines = [
        "| group, who enqueues | step, ms | without averaging, ms | the hook, µs a bucket |",
        "|---|--:|--:|--:|",
    ]
    by = {case["averaging"]: case for case in result.measured}
    for row, alone in zip(by[True]["rows"], by[False]["rows"], strict=True):
        hook = f"{statistics.median(row['hook_us']):.0f}"
        lines.append(f"| {row['name']} | {_spread(row)} | {_spread(alone)} | {hook} |")
    model, buckets = by[True]["model"], by[True]["rows"][0]["buckets"][0]
    note = (
        f"{model} on one GPU by one rank, {buckets:.0f} buckets a step: median (lowest to highest "
        f"round)."
    )
    return "\n".join([*lines, "", note, "", result.provenance()])


def _spread(row: Mapping[str, Any]) -> str:
    times = row["ms"]
    return f"{statistics.median(times):.1f} ({min(times):.1f} to {max(times):.1f})"
