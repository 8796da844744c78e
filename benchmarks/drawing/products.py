"""The tables of large fp32 products: ours beside torch's, at the sizes that layers make."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from benchmarks.drawing.results import Result


def table(result: Result) -> str:
    """Return a row for each product."""
    lines = [
        "| product | m × k × n | torch, ms | hfai, ms | TFLOP/s | speed | error, torch's being 1 |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for case in result.data["cases"]:
        ours, torchs = _median(case, "hfai"), _median(case, "torch")
        error = case["errors"]["hfai"] / case["errors"]["torch"]
        lines.append(
            f"| {case['what']} | {_size(case)} | {torchs:.3f} | {ours:.3f} "
            f"| {case['flops'] / ours / 1e9:.0f} | {torchs / ours:.2f} | {error:.2f} |"
        )
    note = "Kernel time, median of the rounds, everything included: taking apart, adding up."
    return "\n".join([*lines, "", note, "", result.provenance()])


def grid(result: Result) -> str:
    """Return what the grid says of the choice between torch's product and ours."""
    cases = result.data["cases"]
    ours = [case for case in cases if not case["left_to_torch"]]
    torchs = [case for case in cases if case["left_to_torch"]]
    lines = [f"{len(cases)} sizes. {_spread(ours, 'ours')} {_spread(torchs, 'left to torch')}"]
    slower = [case for case in ours if case["speed"] < 1]
    missed = [case for case in torchs if case["speed"] > 1.1]
    for text, found in (("Slower than torch", slower), ("Left, though faster by 10 %", missed)):
        if found:
            sizes = ", ".join(f"{_size(case)} ({case['speed']:.2f})" for case in found)
            lines += ["", f"{text}: {sizes}."]
    return "\n".join([*lines, "", result.provenance()])


def _spread(cases: Sequence[dict[str, Any]], what: str) -> str:
    if not cases:
        return f"None is {what}."
    speeds = [case["speed"] for case in cases]
    return f"{len(cases)} are {what}: at {min(speeds):.2f} to {max(speeds):.2f} of torch's speed."


def _median(case: dict[str, Any], name: str) -> float:
    return float(case["times"][name]["median"])


def _size(case: dict[str, Any]) -> str:
    return " × ".join(str(number) for number in case["size"].values())
