"""Markdown pages with figures between markers.

    <!-- figures:layer_norm -->         kernel times
    <!-- figures:layer_norm:calls -->   whole calls
    <!-- figures:layer_norm:grid -->    the grid: what it found, and its plots
    <!-- figures:allreduce_cpu -->      all-reduces; the other names in DRAWN likewise
    <!-- figures:images:ways -->        several ways of one thing (benchmarks/harness/ways.py)
    <!-- figures:layers:cases -->       the same where cases are many: a row for each
    <!-- /figures -->                   closes each of them

What stands between a marker and its end is replaced; the rest of the page is left as it is.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.drawing import (
    allreduce,
    allreduce_more,
    between,
    cases,
    cores,
    host,
    plots,
    products,
    sweeps,
    tables,
    ways,
)
from benchmarks.drawing.results import Result

OPEN = re.compile(r"<!--\s*figures:([\w:.-]+)\s*-->")
CLOSE = re.compile(r"<!--\s*/figures\s*-->")
KINDS = ("kernel", "calls", "grid", "ways", "cases")
DRAWN = {  # by what draws them: results that have a page's table of their own
    "allreduce_cpu": allreduce.table,
    "allreduce_nodes": allreduce_more.nodes,
    "allreduce_algorithms": between.algorithms,
    "allreduce_nccl": between.nccl,
    "allreduce_caches": host.caches,
    "allreduce_step": host.step,
    "host_adamw": between.host_adamw,
    "attention_cores": cores.table,
    "products": products.table,
    "products_grid": products.grid,
}


def pages(root: Path) -> list[Path]:
    """Return the pages that may carry figures: README.md and everything under docs."""
    readme = root / "README.md"
    found = sorted((root / "docs").rglob("*.md"))
    return [readme, *found] if readme.exists() else found


def fill(text: str, page: Path, root: Path, results: Sequence[Result]) -> str:
    """Return a page's text with every figure drawn anew.

    Raises:
        ValueError: a marker names no figure, or is not closed.
    """
    filled, position = [], 0
    while opening := OPEN.search(text, position):
        closing = CLOSE.search(text, opening.end())
        following = OPEN.search(text, opening.end())
        if closing is None or (following and following.start() < closing.start()):
            raise ValueError(f"{page}: {opening[0]} is not closed: add <!-- /figures --> after it")
        filled += [text[position : opening.end()], "\n\n"]
        try:
            filled.append(figure(opening[1], page, root, results))
        except ValueError as error:
            raise ValueError(f"{page}: {opening[0]}: {error}") from error
        filled += ["\n\n", closing[0]]
        position = closing.end()
    return "".join([*filled, text[position:]])


def figure(name: str, page: Path, root: Path, results: Sequence[Result]) -> str:
    """Return the Markdown of one figure, from the results of every machine.

    Raises:
        ValueError: there is no figure of that name.
    """
    if name.startswith("allreduce") or name in DRAWN:
        measured = [result for result in results if result.name == name]
        if not measured:
            own = name in DRAWN and name != "allreduce_cpu"
            script = f"{name.removesuffix('_grid')}.py" if own else "allreduce.py"
            option = " --device cuda" if "cuda" in name else ""
            option += " --grid" if name.endswith("_grid") else ""
            return f"Not measured yet: `python benchmarks/{script}{option}` does."
        draw_one = DRAWN.get(name, allreduce_more.gpus)
        return "\n\n".join(draw_one(one) for one in measured)
    operator, _, kind = name.partition(":")
    kind = kind or "kernel"
    if kind not in KINDS:
        raise ValueError(f"there are no figures {kind!r}: the kinds are {', '.join(KINDS)}")
    wanted = f"{operator}_grid" if kind == "grid" else operator
    chosen = [result for result in results if result.name == wanted]
    if kind == "cases" and chosen:
        return "\n\n".join(cases.table(result) for result in chosen)
    if kind in ("ways", "cases"):
        return _ways(operator, page, root, chosen)
    if not chosen:
        grid = " --grid" if kind == "grid" else ""
        return f"Not measured yet: `python benchmarks/ops.py --op {operator}{grid}` does."
    draw = {"kernel": tables.kernel_table, "calls": tables.call_table, "grid": tables.grid_summary}
    parts = []
    for result in chosen:
        parts.append(draw[kind](result))
        if kind == "grid":
            parts += [
                f"![{heading(result, file)}]({os.path.relpath(target, page.parent)})"
                for file in _plots_of(result)
                for target in [plot_path(root, file)]
            ]
    return "\n\n".join(parts)


def _ways(name: str, page: Path, root: Path, chosen: Sequence[Result]) -> str:
    if not chosen:
        return f"Not measured yet: `python benchmarks/{name}.py` does."
    parts = []
    for result in chosen:
        target = os.path.relpath(plot_path(root, f"{name}.png"), page.parent)
        parts += [ways.table(result), f"![{result.data['title']}]({target})"]
    return "\n\n".join(parts)


def _plots_of(result: Result) -> list[str]:
    return list(sweeps.plots_of(result) if sweeps.has_sweeps(result) else plots.plots_of(result))


def plot_path(root: Path, file: str) -> Path:
    """Return where a plot lies."""
    return root / "docs" / "figures" / file


def heading(result: Result, file: str) -> str:
    """Return a plot's title."""
    operator = str(result.data["operator"])
    dtype = file.removesuffix(".png").rpartition("-")[2]
    return f"{operator}, {dtype}, {result.machine['name']}"
