"""The tables of what hfreduce does beyond one machine's all-reduce: algorithms, NCCL, HostAdamW."""

from __future__ import annotations

from benchmarks.drawing.allreduce import size
from benchmarks.drawing.results import Result


def algorithms(result: Result) -> str:
    """Return a row for each network, number of machines and size, and a column for each way."""
    names = [row["name"] for row in result.measured[0]["rows"]]
    lines = [
        f"| link | machines | size | {' | '.join(names)} |",
        f"|---|--:|--:|{'---|' * len(names)}",
    ]
    for case in sorted(result.measured, key=lambda case: case["delay_ms"]):
        cells = []
        for at, row in enumerate(case["rows"]):
            low, high = row["ratio_range"]
            spread = f", {row['ratio_median']:.2f}× ({low:.2f} to {high:.2f})" if at else ""
            cells.append(f"{row['median_ms']:.1f} ms{spread}")
        link = f"{case['rate']}, {case['delay_ms']:g} ms"
        lines.append(f"| {link} | {case['nodes']} | {size(case['bytes'])} | {' | '.join(cells)} |")
    note = (
        "Time of one all-reduce of fp32, median of the rounds; speed relative to the first way, "
        "round by round: median (lowest to highest). A link: what a machine sends, and how long a "
        "packet takes."
    )
    if load := result.data.get("load_before"):
        note += f" The {result.machine['cores']} cores had a load of {load} before the first round."
    return "\n".join([*lines, "", note, "", result.provenance()])


def nccl(result: Result) -> str:
    """Return rates by size, a column for each way, once for what NCCL may use."""
    names = [row["name"] for row in result.measured[0]["rows"]]
    lines = [f"| NCCL uses | size | {' | '.join(names)} |", f"|---|--:|{'--:|' * len(names)}"]
    for case in result.measured:
        rates = [case["bytes"] / 2**30 / row["median_ms"] * 1e3 for row in case["rows"]]
        cells = " | ".join(f"{rate:.2f}" for rate in rates)
        lines.append(f"| {case['transport']} | {size(case['bytes'])} | {cells} |")
    note = "Size of the tensor over the time of one all-reduce, median of the rounds, in GiB/s."
    return "\n".join([*lines, "", note, "", result.provenance()])


def host_adamw(result: Result) -> str:
    """Return a row for each number of ranks and type."""
    names = [row["name"] for row in result.measured[0]["rows"]]
    lines = [f"| ranks | type | {' | '.join(names)} |", f"|--:|---|{'---|' * len(names)}"]
    for case in result.measured:
        cells = []
        for at, row in enumerate(case["rows"]):
            low, high = row["ratio_range"]
            spread = f", {row['ratio_median']:.2f} ({low:.2f} to {high:.2f})" if at else ""
            cells.append(f"{row['median_ms']:.1f} ms{spread}")
        lines.append(f"| {case['ranks']} | {case['dtype']} | {' | '.join(cells)} |")
    millions = result.data["parameters"] / 1e6
    note = (
        f"Time of a step of {millions:.0f} million parameters, median of the rounds; behind it "
        "HostAdamW's time over that, round by round: median (lowest to highest). With 2 ranks all "
        "include averaging the gradients."
    )
    if load := result.data.get("load_before"):
        note += f" The {result.machine['cores']} cores had a load of {load} before the first round."
    return "\n".join([*lines, "", note, "", result.provenance()])
