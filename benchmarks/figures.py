"""Draw the README's and docs' tables and plots from benchmarks/results, and from nothing else.

    python benchmarks/figures.py            (make figures)
    python benchmarks/figures.py --check    change nothing; exit 1 if a file is out of date

Tables go between markers in README.md and docs/**/*.md (see benchmarks/drawing/pages.py), plots to
docs/figures.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.drawing import pages, plots, results, sweeps, ways

ROOT = Path(__file__).resolve().parents[1]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--check", is_flag=True, help="Change nothing; exit 1 if a file is out of date.")
@click.option(
    "--root",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    default=ROOT,
    help="The tree whose README.md and docs are filled.  [default: this repository]",
)
@click.option(
    "--results",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Where the result files are.  [default: benchmarks/results under --root]",
)
def main(check: bool, root: Path, directory: Path | None) -> None:
    """Draw tables and plots from the result files."""
    try:
        stale = update(root, directory or root / "benchmarks" / "results", write=not check)
    except ImportError as error:
        click.echo(f"figures.py: {error}: pip install 'hfai[bench]'", err=True)
        sys.exit(1)
    except ValueError as error:
        click.echo(f"figures.py: {error}", err=True)
        sys.exit(1)
    for path in stale:
        name = path.relative_to(root) if path.is_relative_to(root) else path
        click.echo(f"{name} is out of date: run make figures" if check else f"{name} drawn")
    if not stale:
        click.echo("all figures are up to date")
    sys.exit(1 if check and stale else 0)


def update(root: Path, directory: Path, write: bool) -> list[Path]:
    """Bring every figure up to date, or only say which are not; return those paths.

    Raises:
        ValueError: a result file or a marker cannot be understood.
    """
    loaded = results.load(directory)
    stale = []
    for result in loaded:
        if result.data.get("kind") == "ways":
            path = pages.plot_path(root, f"{result.name}.png")
            if result.measured and not plots.is_current(path, ways.digest(result)):
                stale.append(path)
                if write:
                    ways.draw(path, result)
        if not result.name.endswith("_grid"):
            continue
        # Two kinds of grid, drawn by two modules of the same functions.
        drawing: Any = sweeps if sweeps.has_sweeps(result) else plots
        for file, curves in drawing.plots_of(result).items():
            path, heading = pages.plot_path(root, file), pages.heading(result, file)
            if not plots.is_current(path, drawing.digest(curves, heading)):
                stale.append(path)
                if write:
                    drawing.draw(path, curves, heading)
    for page in pages.pages(root):
        before = page.read_text(encoding="utf-8")
        after = pages.fill(before, page, root, loaded)
        if after != before:
            stale.append(page)
            if write:
                temporary = page.with_name(f".{page.name}.new")
                temporary.write_text(after, encoding="utf-8")
                os.replace(temporary, page)
    return stale


if __name__ == "__main__":
    main()
