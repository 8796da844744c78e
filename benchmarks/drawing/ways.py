"""Tables and bars of result files of `benchmarks/harness/ways.py`: several ways of one thing."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing.plots import DIGEST_KEY, STYLES
from benchmarks.drawing.results import Result

OURS = ("ffrecord", "hfai", "hfreduce")
LAST = 50  # figures of a curve that are compared apart


def table(result: Result) -> str:
    """Return one table a case: medians, and ratios round by round to the baseline."""
    parts = []
    for case in result.measured:
        if "by" in case:
            parts.append(_curves(case))
            continue
        baseline = case["baseline"]
        last = f"to {baseline}, round by round" if baseline else "lowest to highest"
        lines = [
            f"| {case['name']} | {case['unit']} | {last} |",
            "|---|--:|--:|",
        ]
        for row in case["rows"]:
            way, median = row["way"], number(row["median"])
            bold = "**" if way.startswith(OURS) else ""
            lines.append(f"| {bold}{way}{bold} | {bold}{median}{bold} | {_ratios(row)} |")
        parts.append("\n".join(lines))
    absent = [f"{way}: {reason}" for way, reason in result.data["absent"].items()]
    if absent:
        parts.append("Not measured: " + "; ".join(absent) + ".")
    rounds = {
        len(row["rounds"]) for case in result.measured for row in case["rows"] if "by" not in case
    }
    shown = "Medians of " + " or ".join(str(count) for count in sorted(rounds)) + " rounds, in turn"
    parts.append(f"{shown}; ratio: median, lowest and highest. {result.provenance()}")
    return "\n\n".join(parts)


def _curves(case: Mapping[str, Any]) -> str:
    """Return a curve's table: where each way ends, and its mean distance from the first way."""
    first, by = case["rows"][0], case["by"]
    heads = (
        f"{case['name']}, {case['unit']}",
        f"last {by}",
        f"mean of the last {LAST} {by}s",
        f"mean distance from {first['way']}, all {by}s",
        f"last {LAST}",
    )
    lines = [f"| {' | '.join(heads)} |", "|---|--:|--:|--:|--:|"]
    for row in case["rows"]:
        figures = row["rounds"]
        distances = [abs(a - b) for a, b in zip(figures, first["rounds"], strict=True)]
        means = [statistics.mean(part) for part in (figures[-LAST:], distances, distances[-LAST:])]
        cells = [f"{figures[-1]:.4f}", f"{means[0]:.4f}", *(f"{mean:.4f}" for mean in means[1:])]
        lines.append(f"| {row['way']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def digest(result: Result) -> str:
    """Return what identifies a plot: its data and the way it is drawn."""
    drawn = json.dumps([result.data["title"], result.measured], sort_keys=True)
    drawn += Path(__file__).read_text(encoding="utf-8")
    return "sha256:" + hashlib.sha256(drawn.encode()).hexdigest()


def draw(path: Path, result: Result) -> None:
    """Draw a panel of bars for each case that compares something, with lines for its rounds."""
    from matplotlib.figure import Figure

    cases = [case for case in result.measured if len(case["rows"]) > 1]
    ways = max(len(case["rows"]) for case in cases)
    columns = min(2, len(cases))
    lines = -(-len(cases) // columns)
    size = (5.2 * columns, lines * (0.7 + 0.26 * ways) + 0.5)
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(lines, columns, squeeze=False)
    figure.suptitle(f"{result.data['title']}, {result.machine['name']}", fontsize=10)
    for axis in axes.flat[len(cases) :]:
        axis.set_axis_off()
    for axis, case in zip(axes.flat, cases, strict=False):
        _panel(axis, case)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={DIGEST_KEY: digest(result), "Software": None})


def number(value: float) -> str:
    """Return a figure with three significant digits, large ones whole with commas."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 else f"{value:.1e}"


def _ratios(row: Mapping[str, Any]) -> str:
    if not row["ratios"]:
        return f"{number(min(row['rounds']))} to {number(max(row['rounds']))}"
    low, high = number(min(row["ratios"])), number(max(row["ratios"]))
    return f"{number(statistics.median(row['ratios']))} ({low} to {high})"


def _panel(axis: Any, case: Mapping[str, Any]) -> None:
    if "by" in case:
        for row in case["rows"]:
            line = "-" if row["way"].startswith(OURS) else ":"
            axis.plot(row["rounds"], line, linewidth=1.2, label=row["way"])
        axis.set_title(f"{case['name']}: {case['unit']} by {case['by']}", fontsize=8)
        axis.legend(fontsize=7)
        axis.tick_params(labelsize=7)
        axis.grid(True, alpha=0.3)
        return
    rows = list(reversed(case["rows"]))
    for place, row in enumerate(rows):
        style = STYLES["hfai" if row["way"].startswith(OURS) else "torch"]
        axis.barh(place, row["median"], color=style["color"], height=0.7)
        axis.plot([min(row["rounds"]), max(row["rounds"])], [place] * 2, color="black", linewidth=1)
        axis.annotate(
            f" {number(row['median'])}",
            (max(row["rounds"]), place),
            va="center",
            fontsize=7,
        )
    axis.set_yticks(range(len(rows)), [row["way"] for row in rows], fontsize=7)
    axis.set_title(f"{case['name']}: {case['unit']}", fontsize=8)
    positive = [row["median"] for row in rows if row["median"] > 0]
    if positive and max(positive) > 200 * min(positive):
        axis.set_xscale("log")
    axis.margins(x=0.18)
    axis.tick_params(axis="x", labelsize=7)
    axis.grid(True, axis="x", alpha=0.3)
