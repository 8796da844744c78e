"""Several ways of doing one thing, measured in turn: rounds, ratios by round, the result file.

    {"kind": "ways", "title", "script", "complete", "command", "date", "commit", "machine",
     "versions", "absent": {way: reason},
     "cases": [{"name", "unit", "baseline", "lower_is_better", "skipped": "",
                "rows": [{"way", "rounds": […], "median", "ratios": […]}]}]}

Where there is no baseline there are no ratios. A case with "by": "step" is a curve: its "rounds"
are one figure a step.

A ratio is taken within a round, over the baseline's figure of that round, because a machine's speed
changes from minute to minute.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

from benchmarks.harness import machine

Measure = Callable[[int], float]
"""Takes the number of the round, returns one figure."""


def in_turn(
    name: str,
    unit: str,
    ways: Mapping[str, Measure],
    rounds: int,
    baseline: str | None,
    *,
    lower_is_better: bool = False,
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Measure all ways, round after round, each round starting with another one.

    Args:
        name: The case.
        unit: Of the figures.
        ways: Each by its name.
        rounds: How many.
        baseline: The way that ratios are taken over; None where a ratio says nothing.
        lower_is_better: Of the figures, for drawing.
        say: Called with a line for each way at the end.

    Returns:
        The case as the result file holds it.
    """
    figures: dict[str, list[float]] = {way: [] for way in ways}
    names = list(ways)
    for turn in range(rounds):
        for place in range(len(names)):
            way = names[(turn + place) % len(names)]
            figures[way].append(ways[way](turn))
    return as_case(name, unit, figures, baseline, lower_is_better=lower_is_better, say=say)


def as_case(
    name: str,
    unit: str,
    figures: Mapping[str, Sequence[float]],
    baseline: str | None,
    *,
    lower_is_better: bool = False,
    by: str = "",
    say: Callable[[str], object] = print,
) -> dict[str, Any]:
    """Return a case as the result file holds it, from each way's figures by round.

    Arguments are as for `in_turn`; `by` names what the figures run over if it is not rounds.
    """
    rows = []
    say(f"{name}, {unit}")
    for way, found in figures.items():
        over = figures[baseline] if baseline is not None else []
        ratios = [a / b for a, b in zip(found, over, strict=False)]
        rows.append(
            {
                "way": way,
                "rounds": [float(f"{figure:.5g}") for figure in found],
                "median": float(f"{statistics.median(found):.5g}"),
                "ratios": [float(f"{ratio:.4g}") for ratio in ratios],
            }
        )
        middle = f"{statistics.median(ratios):8.3g} x" if ratios else ""
        say(f"  {way:<44}{rows[-1]['median']:>12,.4g}{middle}")
    return {
        "name": name,
        "unit": unit,
        "baseline": baseline,
        "lower_is_better": lower_is_better,
        "skipped": "",
        **({"by": by} if by else {}),
        "rows": rows,
    }


def document(
    script: str,
    title: str,
    arguments: Sequence[str],
    packages: Sequence[str],
    absent: Mapping[str, str],
) -> dict[str, Any]:
    """Return a result file without cases.

    Args:
        script: Its name in benchmarks/.
        title: Of the plot.
        arguments: The script's, as given.
        packages: Peers whose versions belong to the figures.
        absent: Ways that could not take part, and why.
    """
    cpu = torch.device("cpu")
    versions = machine.versions(cpu)
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {
        "kind": "ways",
        "title": title,
        "script": script,
        "complete": False,
        "command": shlex.join(["python", f"benchmarks/{script}", *arguments]),
        "date": machine.now(),
        "commit": machine.commit(),
        "machine": machine.describe(cpu),
        "versions": versions,
        "absent": dict(absent),
        "cases": [],
    }
