"""The tables of all-reduces on GPUs (allreduce_cuda.py) and over machines (allreduce_nodes.py)."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.drawing.allreduce import ratio, size
from benchmarks.drawing.results import Result

Case = Mapping[str, Any]


def nodes(result: Result) -> str:
    """Return times and ratios to gloo, a row for each number of machines and size."""
    names = [row["name"] for row in result.measured[0]["rows"]]
    ways = [name for name in names if name != "gloo"]
    lines = [
        f"| machines | ranks | size | gloo | {' | '.join(ways)} |",
        f"|--:|--:|--:|--:|{'---|' * len(ways)}",
    ]
    for case in result.measured:
        rows = {row["name"]: row for row in case["rows"]}
        cells = [f"{rows[name]['median_ms']:.1f} ms, {ratio(rows[name])}" for name in ways]
        lines.append(
            f"| {case['nodes']} | {case['ranks']} | {size(case['bytes'])} "
            f"| {rows['gloo']['median_ms']:.1f} ms | {' | '.join(cells)} |"
        )
    note = (
        "Time of one all-reduce of fp32, median of the rounds; ratio to gloo over all ranks, round "
        f"by round: median (lowest to highest). Each link carries {result.data['rate']}."
    )
    return "\n".join([*lines, "", note, "", result.provenance()])


def gpus(result: Result) -> str:
    """Return GiB/s by type, size and way, and what else was measured in lines."""
    parts = ["\n".join(_rates(result.measured)), "\n".join(_rest(result.measured))]
    shared = any(not case.get("own_gpu", True) for case in result.measured)
    note = "Size of the tensor over the time of one all-reduce, median of the rounds, in GiB/s."
    if shared:
        note += " The ranks shared one GPU and its link."
    if lost := result.data.get("lost"):
        note += f" Left out: {'; '.join(f'{name} ({why})' for name, why in lost.items())}."
    return "\n\n".join([*filter(None, parts), note, result.provenance()])


def _rates(cases: Sequence[Case]) -> Iterator[str]:
    chosen = [case for case in cases if case["case"] == "all-reduce"]
    if not chosen:
        return
    ways = list(dict.fromkeys(row["name"] for case in chosen for row in case["rows"]))
    yield f"| ranks | type | size | {' | '.join(ways)} |"
    yield f"|--:|---|--:|{'--:|' * len(ways)}"
    order = {name: index for index, name in enumerate(["fp32", "bf16", "fp16"])}
    for case in sorted(chosen, key=lambda c: (c["ranks"], order[c["dtype"]], c["bytes"])):
        rates = {row["name"]: f"{row['gib_per_s']:.2f}" for row in case["rows"]}
        cells = " | ".join(rates.get(way, "") for way in ways)
        yield f"| {case['ranks']} | {case['dtype']} | {size(case['bytes'])} | {cells} |"


def _rest(cases: Sequence[Case]) -> Iterator[str]:
    trips = [case for case in cases if "chunk_bytes" in case and "gib_per_s" in case]
    if trips:
        shown = ", ".join(f"{c['gib_per_s']:.1f} in {size(c['chunk_bytes'])}" for c in trips)
        yield f"- One rank, 1 GiB to the host and back, GiB/s by chunk: {shown}."
    for case in cases:
        if "hook_to_ddp" in case:
            middle, low, high = case["hook_to_ddp"]
            yield (
                f"- {case['case']}: with the hook {middle:.3f} times DDP's without "
                f"({low:.3f} to {high:.3f})."
            )
        elif "used" in case:
            yield f"- Settings that were found: {_named(case['used'])}."
            busy = case["share of time busy, by rank"][0]
            yield f"- Of an all-reduce's time, rank 0 had under way: {_named(busy)}."
        elif "seconds_until_raised" in case:
            yield f"- {case['case'].capitalize()}: noticed in {case['seconds_until_raised']:.2f} s."
        elif "rows" in case and case["case"] != "all-reduce":
            shown = "; ".join(f"{row['name']} {_cell(row)}" for row in case["rows"])
            what = f"{case['case'][0].upper()}{case['case'][1:]}"
            if "bytes" in case:
                what += f", {case['dtype']}, {size(case['bytes'])}"
            yield f"- {what}: {shown}."


def _cell(row: Case) -> str:
    if "slowed_percent" in row:
        return f"slows it by {row['slowed_percent']:.1f} %"
    if "gib_per_s" in row:
        return f"{row['gib_per_s']:.1f} GiB/s"
    if "ms_without_averaging" in row:
        alone = row["ms_without_averaging"]
        return f"{statistics.median(row['ms']):.1f} ms (without averaging {alone:.1f})"
    (found,) = [value for name, value in row.items() if name != "name"]
    return ", ".join(map(str, found))


def _named(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in values.items())
