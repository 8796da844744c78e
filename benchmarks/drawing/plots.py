"""Plots of the grid: time over row length, one panel for each pass and number of rows.

A PNG's bytes depend on matplotlib's version, so a plot is not compared by its bytes: it carries a
digest of the data it shows and of this file, and is up to date where the digest is.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing.results import TITLES, Result, median_ms

PASSES = ("forward", "backward")
DIGEST_KEY = "Description"
STYLES: Mapping[str, Mapping[str, Any]] = {
    "hfai": {"color": "#1f5fbf", "marker": "o", "linewidth": 2.0, "zorder": 3},
    "torch": {"color": "#8a8a8a", "marker": "s", "linewidth": 1.3},
    "liger": {"color": "#e08a1e", "marker": "^", "linewidth": 1.3},
}

LENGTH_TICKS = (32, 256, 2048, 16384, 131072)

# panel -> curve -> [(row length, milliseconds)]
Panel = tuple[str, int]
Curves = dict[Panel, dict[str, list[tuple[int, float]]]]


def plots_of(result: Result) -> dict[str, Curves]:
    """Return the curves of each plot of a grid, by the plot's file name."""
    plots: dict[str, Curves] = {}
    for case in result.measured:
        name = f"{result.name}-{result.machine['slug']}-{case['dtype']}.png"
        for what in PASSES:
            panel = (what, case["sizes"]["rows"])
            curves = plots.setdefault(name, {}).setdefault(panel, {})
            length = case["sizes"]["length"]
            for implementation in result.implementations:
                time = median_ms(case, implementation, "kernel", what)
                if time is not None:
                    curves.setdefault(implementation, []).append((length, time))
            curves.setdefault("floor", []).append((length, case["floor"][what]["ms"]))
    return plots


def digest(curves: Curves, heading: str) -> str:
    """Return what identifies a plot: its data and the way it is drawn."""
    data = sorted((panel, sorted(found.items())) for panel, found in curves.items())
    drawn = json.dumps([heading, data]) + Path(__file__).read_text(encoding="utf-8")
    return "sha256:" + hashlib.sha256(drawn.encode()).hexdigest()


def is_current(path: Path, expected: str) -> bool:
    """Say whether a PNG shows the data with this digest."""
    from PIL import Image

    if not path.exists():
        return False
    with Image.open(path) as image:
        return bool(image.info.get(DIGEST_KEY) == expected)


def draw(path: Path, curves: Curves, heading: str) -> None:
    """Draw one plot and write it as a PNG."""
    from matplotlib.figure import Figure

    row_counts = sorted({rows for _, rows in curves})
    size = (1.5 + 3.1 * len(row_counts), 1.3 + 2.7 * len(PASSES))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(PASSES), len(row_counts), squeeze=False, sharex=True)
    figure.suptitle(heading)
    for i, what in enumerate(PASSES):
        for j, rows in enumerate(row_counts):
            axis = axes[i][j]
            _draw_panel(axis, curves.get((what, rows), {}))
            axis.set_title(f"{what}, {rows} row{'s' if rows > 1 else ''}", fontsize=10)
            if i == len(PASSES) - 1:
                axis.set_xlabel("row length")
            if j == 0:
                axis.set_ylabel("kernel time, µs")
    handles = {
        label: handle
        for row in axes
        for axis in row
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=len(handles))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={DIGEST_KEY: digest(curves, heading), "Software": None})


def _draw_panel(axis: Any, curves: Mapping[str, list[tuple[int, float]]]) -> None:
    measured = []
    for name, points in curves.items():
        lengths, times = zip(*sorted(points), strict=True)
        microseconds = [time * 1e3 for time in times]
        style: Mapping[str, Any] = STYLES.get(name, {"marker": "x", "linewidth": 1.3})
        if name == "floor":
            style = {"color": "black", "linestyle": ":", "linewidth": 1.2}
        else:
            measured += microseconds
        axis.plot(lengths, microseconds, label=TITLES.get(name, name), markersize=3.5, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    if measured:  # of the floor of tiny inputs only that it is far below
        axis.set_ylim(min(measured) / 2, max(max(measured) * 1.5, min(measured) * 30))
    axis.set_xticks(LENGTH_TICKS)
    for dimension in (axis.xaxis, axis.yaxis):
        dimension.set_major_formatter(lambda value, position: f"{value:g}")
        dimension.set_minor_formatter("")
    axis.tick_params(labelsize=8)
    axis.grid(True, which="major", alpha=0.3)
