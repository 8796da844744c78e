"""A table of many cases of `benchmarks/harness/ways.py`: one row for each."""

from __future__ import annotations

from benchmarks.drawing.results import Result
from benchmarks.drawing.ways import _ratios, number


def table(result: Result) -> str:
    """Return a row for each case: the baseline's median, and the other ways' ratios to it.

    Cases that compare the same ways share a table.
    """
    tables: dict[tuple[str, ...], list[str]] = {}
    for case in result.measured:
        ways = tuple(row["way"] for row in case["rows"])
        if ways not in tables:
            shown = [f"{ways[0]}, {case['unit']}", *(f"{way}, to {ways[0]}" for way in ways[1:])]
            tables[ways] = [f"| case | {' | '.join(shown)} |", "|---|" + "--:|" * len(ways)]
        first, *others = case["rows"]
        cells = [case["name"], number(first["median"]), *(_ratios(row) for row in others)]
        tables[ways].append(f"| {' | '.join(cells)} |")
    parts = ["\n".join(lines) for lines in tables.values()]
    return "\n\n".join([*parts, f"Ratio: median, lowest and highest. {result.provenance()}"])
