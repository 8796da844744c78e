"""Plots of grids with a size that varies and one that stays: recurrent layers and attention.

Recurrent layers over hidden size and over batch, one picture for each type and each of the two, a
panel for each pass and value of the other; attention over length, one picture for each type and
kind of mask, a panel for each pass and head dimension. As in `plots`, a picture carries a digest of
its data by which it is known to be up to date.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.drawing.plots import DIGEST_KEY, PASSES, STYLES
from benchmarks.drawing.results import TITLES, Result, median_ms

# What varies -> what stays, and how the axis is labelled.
SWEEPS = {
    "hidden": ("batch", "hidden units"),
    "batch": ("hidden", "sequences in the batch"),
    "length": ("head dimension", "rows of a sequence"),
}
RECURRENT, ATTENTION = ("hidden", "batch"), ("length",)
MASKS = ("", "-causal", "-padded")  # by the number of the kind
LEAST_POINTS = 3  # of a panel

# panel -> curve -> [(what varies, milliseconds)]; a panel is the pass, what varies, and the other.
Panel = tuple[str, str, int]
Curves = dict[Panel, dict[str, list[tuple[int, float]]]]


def has_sweeps(result: Result) -> bool:
    """Return whether a grid is one of those that are drawn here."""
    return any("hidden" in case["sizes"] or "heads" in case["sizes"] for case in result.measured)


def _sizes(case: Mapping[str, Any]) -> dict[str, int]:
    """Return a case's sizes by the names of `SWEEPS`."""
    sizes = dict(case["sizes"])
    if "heads" in sizes:
        sizes["head dimension"] = sizes["features"] // sizes["heads"]
    return sizes


def plots_of(result: Result) -> dict[str, Curves]:
    """Return the curves of each picture of a grid, by the picture's file name."""
    found: dict[str, Curves] = {}
    for case in result.measured:
        sizes = _sizes(case)
        mask = MASKS[sizes.get("kind", 0)]
        for along in ATTENTION if "heads" in sizes else RECURRENT:
            fixed, _ = SWEEPS[along]
            name = f"{result.name}-{result.machine['slug']}-{along}-{case['dtype']}{mask}.png"
            for what in PASSES:
                panel = (what, along, sizes[fixed])
                curves = found.setdefault(name, {}).setdefault(panel, {})
                for implementation in result.implementations:
                    time = median_ms(case, implementation, "kernel", what)
                    if time is not None:
                        points = curves.setdefault(implementation, [])
                        points.append((sizes[along], time))
    return {name: long for name, curves in found.items() if (long := _long_panels(curves))}


def _long_panels(curves: Curves) -> Curves:
    """Leave out values of what stays that the other sweep passed by."""
    sizes = {
        panel: len({x for points in found.values() for x, _ in points})
        for panel, found in curves.items()
    }
    kept = {panel[1:] for panel, count in sizes.items() if count >= LEAST_POINTS}
    return {panel: found for panel, found in curves.items() if panel[1:] in kept}


def digest(curves: Curves, heading: str) -> str:
    """Return what identifies a picture: its data and the way it is drawn."""
    data = sorted((panel, sorted(found.items())) for panel, found in curves.items())
    drawn = json.dumps([heading, data]) + Path(__file__).read_text(encoding="utf-8")
    return "sha256:" + hashlib.sha256(drawn.encode()).hexdigest()


def draw(path: Path, curves: Curves, heading: str) -> None:
    """Draw one picture and write it as a PNG."""
    from matplotlib.figure import Figure

    (along,) = {panel[1] for panel in curves}
    fixed, label = SWEEPS[along]
    values = sorted({panel[2] for panel in curves})
    size = (1.5 + 3.4 * len(values), 1.3 + 2.7 * len(PASSES))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.subplots(len(PASSES), len(values), squeeze=False, sharex=True)
    figure.suptitle(heading)
    for i, what in enumerate(PASSES):
        for j, value in enumerate(values):
            axis = axes[i][j]
            _draw_panel(axis, curves.get((what, along, value), {}))
            axis.set_title(f"{what}, {fixed} {value}", fontsize=10)
            if i == len(PASSES) - 1:
                axis.set_xlabel(label)
            if j == 0:
                axis.set_ylabel("kernel time, ms")
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
    ticks = sorted({x for points in curves.values() for x, _ in points})
    for name, points in curves.items():
        xs, times = zip(*sorted(points), strict=True)
        style = STYLES.get(name, {"marker": "x", "linewidth": 1.3})
        axis.plot(xs, times, label=TITLES.get(name, name), markersize=3.5, **style)
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks([x for x in ticks if x & (x - 1) == 0])
    for dimension in (axis.xaxis, axis.yaxis):
        dimension.set_major_formatter(lambda value, position: f"{value:g}")
        dimension.set_minor_formatter("")
    axis.tick_params(labelsize=8)
    axis.grid(True, which="major", alpha=0.3)
