"""Measure an operator: ours, torch, compiled torch and the peers that are installed, in one run.

    python benchmarks/ops.py --op layer_norm
    python benchmarks/ops.py --op layer_norm --grid

Each implementation is checked against a float64 reference and then timed, all in turns. The table
is printed, and the result file is written after every case: a run that is killed keeps what it
has measured. A whole run on a GPU writes to benchmarks/results/<machine>/<op>.json (with --grid
<op>_grid.json); a part of one (--cases, --quick) and a run on a CPU are written only where --out
says so. How the times are taken stands in docs/benchmarks.md.

Exit status: 0 done (or stopped by --time-budget), 1 our implementation was wrong or failed or the
device was lost, 2 wrong arguments, 130 interrupted.
"""

from __future__ import annotations

import json
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from rich.live import Live

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # for hfai, if not installed

from benchmarks.harness import machine, result, run, table
from benchmarks.harness.case import Case, Operator
from benchmarks.harness.ceiling import Ceilings, measure_ceilings
from benchmarks.operators import OPERATORS
from hfai.kernels.extension import compile_all

RESULTS = Path(__file__).resolve().parent / "results"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--op",
    "operators",
    multiple=True,
    required=True,
    type=click.Choice(sorted(OPERATORS)),
    help="The operator; may be given several times.",
)
@click.option("--grid", is_flag=True, help="The grid of sizes: kernel time only, fewer rounds.")
@click.option("--quick", is_flag=True, help="Fewer rounds, to see that everything runs.")
@click.option(
    "--cases", "substrings", multiple=True, help="Only cases whose name contains this (64x768)."
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: the GPU where there is one.",
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    help="Write DIR/<machine>/<op>.json.  [default: benchmarks/results, for whole runs on a GPU]",
)
@click.option(
    "--time-budget",
    type=click.FloatRange(min=0, min_open=True),
    metavar="SECONDS",
    help="Start no further case after this long.",
)
@click.option(
    "--keep",
    is_flag=True,
    help="Keep the cases that the result file has, of the same device and versions, where this run "
    "does not measure them.",
)
@click.option(
    "--missing",
    is_flag=True,
    help="As --keep, and measure only cases that the result file has not or in which something "
    "failed.",
)
@click.option("--commit", help="Recorded as the commit.  [default: the checked-out one]")
@click.option("--seed", type=int, help="Of the random inputs.  [default: another each run]")
@click.option("--debug", is_flag=True, help="Show the traceback of an unexpected error.")
def main(
    operators: Sequence[str],
    grid: bool,
    quick: bool,
    substrings: Sequence[str],
    device: str,
    out: Path | None,
    time_budget: float | None,
    keep: bool,
    missing: bool,
    commit: str | None,
    seed: int | None,
    debug: bool,
) -> None:
    """Measure operators against torch and peers; see docs/benchmarks.md."""
    begin = time.monotonic()
    chosen = [OPERATORS[name]() for name in dict.fromkeys(operators)]
    cases = {operator.name: select(operator, grid, substrings) for operator in chosen}
    target = choose_device(device)
    on_gpu = target.type == "cuda"
    if out is None and on_gpu and not (quick or substrings):
        out = RESULTS
    out_of_time = (lambda: time.monotonic() - begin > time_budget) if time_budget else lambda: False
    seed = secrets.randbelow(2**31) if seed is None else seed
    header: dict[str, Any] = {
        "command": machine.command(sys.argv[1:]),
        "date": machine.now(),
        "commit": commit or machine.commit(),
        "seed": seed,
        "machine": machine.describe(target),
        "versions": machine.versions(target),
    }
    settings = run.QUICK if quick else run.FULL
    if grid:
        settings = run.GRID if on_gpu else run.GRID_ON_CPU
    console = Console(width=None if sys.stdout.isatty() else 160)
    if on_gpu:
        compile_all()  # C++ parts, which a user's first seconds go without
    # Graphs are captured on a side stream, and everything that they touch must have lived there.
    stream = side_stream(target) if on_gpu else nullcontext()
    sound = True
    try:
        with stream:
            units = {w.unit for o in chosen for c in cases[o.name] for w in o.work(c)}
            ceilings = measure_ceilings(target, units)
            console.print(opening(header, ceilings), highlight=False, markup=False)
            header["ceilings"] = asdict(ceilings)
            for operator in chosen:
                name = f"{operator.name}_grid" if grid else operator.name
                path = out / header["machine"]["slug"] / f"{name}.json" if out else None
                session = Session(operator, header, path, console)
                wanted = cases[operator.name]
                if (keep or missing) and path is not None and path.exists():
                    names = [case.name for case in (operator.grid() if grid else operator.cases())]
                    earlier = json.loads(path.read_text(encoding="utf-8"))
                    session.keep(earlier, names)
                    if missing:
                        there = result.measured_whole(earlier)
                        wanted = [case for case in wanted if case.name not in there]
                session.run(wanted, target, ceilings, settings, seed, out_of_time)
                sound &= session.report(tables=not grid)
    except KeyboardInterrupt:
        click.echo("interrupted: cases that were done are in the result file, if any", err=True)
        sys.exit(130)
    except Exception as error:
        if debug:
            raise
        click.echo(f"ops.py: {result.first_line(error)} (--debug shows where)", err=True)
        sys.exit(1)
    sys.exit(0 if sound else 1)


class Session:
    """The measurement of one operator: its results so far, on the screen and in the file."""

    def __init__(
        self, operator: Operator, header: dict[str, Any], path: Path | None, console: Console
    ) -> None:
        self.operator = operator
        self.header = header
        self.path = path
        self.console = console
        self.results: list[result.CaseResult] = []
        self.complete = False
        self.earlier: tuple[dict[str, Any], list[str]] | None = None

    def keep(self, earlier: dict[str, Any], order: list[str]) -> None:
        """Let cases of an earlier run's file stand where this one does not measure them.

        Raises:
            ValueError: That run was of another device, or of other versions.
        """
        self.earlier = earlier, order
        result.merged(earlier, self.document(), order)

    def run(
        self,
        cases: Sequence[Case],
        device: torch.device,
        ceilings: Ceilings,
        settings: run.Settings,
        seed: int,
        out_of_time: Callable[[], bool],
    ) -> None:
        """Measure case after case, writing the file after each, until the time is up."""
        # Progress shares the terminal with the lines, or has stderr where those are piped. It is
        # drawn by this thread alone: another would take turns with what is being timed.
        screen = self.console if self.console.is_terminal else Console(stderr=True)
        with Live(
            console=screen, transient=True, auto_refresh=False, redirect_stdout=False
        ) as progress:
            for index, case in enumerate(cases):
                if out_of_time():
                    left = len(cases) - index
                    self.console.print(f"--time-budget is used up: {left} cases were not measured")
                    return
                label = f"{index + 1}/{len(cases)} {self.operator.name} {case.name}"

                def report(step: str, label: str = label) -> None:
                    progress.update(f"{label}: {step}", refresh=True)

                measured = run.measure(
                    self.operator, case, device, ceilings, settings, seed + index, report
                )
                self.results.append(measured)
                self.complete = len(self.results) == len(cases)
                self.write()
                self.console.print(
                    table.case_line(measured), highlight=False, markup=False, soft_wrap=True
                )

    def write(self) -> None:
        """Write what there is, if anywhere."""
        if self.path is not None:
            document = self.document()
            if self.earlier is not None:
                document = result.merged(self.earlier[0], document, self.earlier[1])
            result.write(self.path, document)

    def document(self) -> dict[str, Any]:
        """Return what the file holds of this run."""
        run = {key: self.header[key] for key in ("date", "commit")}
        return {
            "operator": self.operator.name,
            "complete": self.complete,
            **self.header,
            "cases": [{**one.as_dict(), **run} for one in self.results],
        }

    def report(self, tables: bool) -> bool:
        """Print the tables, or the grid's count; return whether ours was right wherever it ran."""
        if tables:
            table.print_tables(self.console, self.results)
        else:
            measured = [one for one in self.results if not one.skipped]
            slower = [
                one for one in measured if any(c["slower"] for c in one.comparison().values())
            ]
            compared = [one for one in measured if one.comparison()]
            self.console.print(
                f"{len(measured)} cases; ours is slower in {len(slower)} of {len(compared)} "
                f"with kernel times"
            )
            for remark in table.remarks(slower):
                self.console.print(remark, highlight=False, markup=False)
        if self.path is not None and self.results:
            click.echo(f"written to {self.path}")
        ours = [one.row("hfai") for one in self.results]
        return not any(row is not None and table.is_fault(row) for row in ours)


def select(operator: Operator, grid: bool, substrings: Sequence[str]) -> list[Case]:
    """Return the operator's cases whose names contain one of the substrings, or all.

    Raises:
        click.BadParameter: none does.
    """
    cases = list(operator.grid() if grid else operator.cases())
    wanted = [substring.replace("×", "x") for substring in substrings]
    chosen = [case for case in cases if not wanted or any(w in case.name for w in wanted)]
    if not chosen:
        names = ", ".join(case.name for case in cases[:8]) + (", …" if len(cases) > 8 else "")
        raise click.BadParameter(
            f"no case of {operator.name} contains {' or '.join(map(repr, wanted))}: "
            f"the names are {names}",
            param_hint="--cases",
        )
    return chosen


def choose_device(name: str) -> torch.device:
    """Return the device that is named, or with "auto" the one there is.

    Raises:
        click.BadParameter: "cuda" where torch sees no GPU.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise click.BadParameter(
            "torch sees no GPU here (hfai doctor says why): use --device cpu", param_hint="--device"
        )
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def side_stream(device: torch.device) -> AbstractContextManager[None]:
    """Return a context on a stream other than the default one."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return torch.cuda.stream(stream)


def opening(header: dict[str, Any], ceilings: Ceilings) -> str:
    """Return the lines that say what is measured where."""
    found = " · ".join(f"{name} {version}" for name, version in header["versions"].items())
    driver = header["machine"].get("driver")
    where = header["machine"]["name"] + (f", driver {driver}" if driver else "")
    copy = f"device copy {ceilings.bytes_per_second / 1e12:.3g} TB/s (bytes read + written)"
    rates = "".join(
        f", {unit} products {rate / 1e12:.3g} TFLOP/s"
        for unit, rate in ceilings.operations_per_second.items()
    )
    return f"{where}\n{found}\n{copy}{rates}"


if __name__ == "__main__":
    main()
