"""Markdown tables from result files: kernel times, whole calls, and what the grid found."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.drawing.results import TITLES, Result, median_ms, row_of

KERNEL_PASSES = {"forward": "forward", "backward": "backward"}
CALL_PASSES = {
    "no_grad": "forward, no grad",
    "forward": "forward",
    "both": "forward + backward",
}
MOST_SLOWER_LISTED = 20


def kernel_table(result: Result) -> str:
    """Return kernel times with ours against torch and against the floor."""
    copy = result.data["ceilings"]["bytes_per_second"] / 1e12
    note = (
        "Kernel time in ms, median of CUDA graph replays with a cold L2 cache. The floor is each "
        f"byte moved once at the {copy:.2f} TB/s that a device copy reached in the same run"
    )
    floors = [floor for case in result.measured for floor in case["floor"].values()]
    if any(floor["ms"] > 1.01 * floor["bytes"] / copy / 1e9 for floor in floors):
        note += ", or all operations at the rate of a large product, where that takes longer"
    note += "."

    def floor(case: Mapping[str, Any], what: str) -> str:
        ours = median_ms(case, "hfai", "kernel", what)
        return f"{case['floor'][what]['ms'] / ours:.0%}" if ours else "–"

    return _table(result, "kernel", KERNEL_PASSES, note, ("of the floor", floor))


def call_table(result: Result) -> str:
    """Return whole-call times, and the memory that a forward and backward takes."""
    note = (
        "Whole call in eager in ms as the host's clock sees it, median. Memory: the peak of one "
        "forward and backward beyond the inputs, ours / torch's."
    )

    def memory(case: Mapping[str, Any], what: str) -> str:
        rows = [row_of(case, name) for name in ("hfai", "torch")]
        peaks = [row["peak_memory_bytes"] if row else None for row in rows]
        if what != "both" or None in peaks:
            return ""
        return " / ".join(f"{peak / 2**20:.1f}" for peak in peaks if peak is not None) + " MiB"

    return _table(result, "call", CALL_PASSES, note, ("memory", memory))


def grid_summary(result: Result) -> str:
    """Return how often ours was behind the best of the others on the grid, and where."""
    compared = [
        (case, what, comparison)
        for case in result.measured
        for what, comparison in case["comparison"].items()
    ]
    slower = [entry for entry in compared if entry[2]["slower"]]
    skipped = len(result.data["cases"]) - len(result.measured)
    others = [TITLES.get(name, name) for name in result.implementations if name != "hfai"]
    sizes = len({case["name"] for case, _, _ in compared})
    apart = len(result.measured) - sizes
    without = f"; {apart} more without a comparison: one side failed its check" if apart else ""
    summary = (
        f"{sizes} sizes, forward and backward apart ({skipped} more do not fit in memory{without})"
        f": hfai is slower than the best of {' and '.join(others)} in {len(slower)} of "
        f"{len(compared)} (by more than 3 % and 0.3 µs)."
    )
    lines = [summary]
    if slower:
        lines += ["", "| size | pass | hfai, ms | best other, ms | |", "|---|---|--:|--:|---|"]
        worst = sorted(slower, key=lambda entry: float(entry[2]["times_faster"]))
        for case, what, comparison in worst[:MOST_SLOWER_LISTED]:
            best = comparison["best_other"]
            ours_ms, best_ms = (median_ms(case, name, "kernel", what) for name in ("hfai", best))
            lines.append(
                f"| {title(case)} | {what} | {number(ours_ms)} | {number(best_ms)} | "
                f"{TITLES.get(best, best)} |"
            )
        if len(slower) > MOST_SLOWER_LISTED:
            lines.append(f"\n{len(slower) - MOST_SLOWER_LISTED} more are in the result file.")
    return "\n".join([*lines, "", result.provenance()])


def title(case: Mapping[str, Any]) -> str:
    """Return a case's name with a proper sign of multiplication between the extents."""
    return re.sub(r"(?<=\d)x(?=\d)", "×", case["name"])


def number(milliseconds: float | None) -> str:
    """Return a time in milliseconds with three significant digits."""
    if milliseconds is None:
        return "–"
    if milliseconds >= 100:
        return f"{milliseconds:.0f}"
    digits = 2
    while digits < 6 and milliseconds < 10 ** (1 - digits + 1):
        digits += 1
    return f"{milliseconds:.{digits}f}" if milliseconds < 10 else f"{milliseconds:.1f}"


def _table(
    result: Result,
    kind: str,
    passes: Mapping[str, str],
    note: str,
    last: tuple[str, Callable[[Mapping[str, Any], str], str]],
) -> str:
    names = result.implementations
    headings = ["size", "pass", *(TITLES.get(name, name) for name in names), "hfai vs torch"]
    headings.append(last[0])
    lines = [_row(headings), "|---|---|" + "--:|" * (len(headings) - 2)]
    for case in result.measured:
        for index, (what, label) in enumerate(passes.items()):
            ours, torchs = (median_ms(case, name, kind, what) for name in ("hfai", "torch"))
            cells = [title(case) if index == 0 else "", label]
            cells += [_cell(case, name, kind, what) for name in names]
            cells.append(f"**{torchs / ours:.2f}×**" if ours and torchs else "–")
            lines.append(_row([*cells, last[1](case, what)]))
    paths = {
        row["path"].partition(": ")[2]
        for case in result.measured
        for row in case["implementations"]
        if row["name"] == "hfai" and row["path"].startswith("torch")
    }
    on_torch = [f"hfai ran torch's own path here ({reason})." for reason in sorted(paths)]
    return "\n".join([*lines, "", " ".join([note, *on_torch]), "", result.provenance()])


def _cell(case: Mapping[str, Any], name: str, kind: str, what: str) -> str:
    row = row_of(case, name)
    if row is not None and row["status"] in ("wrong", "failed"):
        return str(row["status"])
    shown = number(median_ms(case, name, kind, what))
    return f"**{shown}**" if name == "hfai" and shown != "–" else shown


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
