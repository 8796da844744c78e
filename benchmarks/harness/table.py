"""What a run prints: a line a case while it runs, tables at the end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table

from benchmarks.harness.result import CaseResult, Row
from benchmarks.harness.timing import Summary


def case_line(result: CaseResult) -> str:
    """Return one line on a case: each pass's times, ours against each other implementation."""
    name = f"{result.case.name:<18}"
    if result.skipped:
        return f"{name} skipped: {result.skipped}"
    parts = []
    for label, direction in (("fwd", "forward"), ("bwd", "backward")):
        shown = [
            f"{row.name} {duration(row.kernel[direction].median_ms)}"
            for row in result.rows
            if direction in row.kernel
        ]
        if shown:
            parts.append(f"{label} {'  '.join(shown)}")
    if not parts:
        shown = [
            f"{row.name} {duration(row.call['both'].median_ms)}" for row in result.rows if row.call
        ]
        if shown:
            parts.append(f"whole call fwd+bwd {'  '.join(shown)}")
    parts += [f"{row.name} {row.status}: {row.reason}" for row in result.rows if is_fault(row)]
    parts += [
        f"SLOWER than {compared['best_other']} {direction} ({compared['times_faster']:.2f}x)"
        for direction, compared in result.comparison().items()
        if compared["slower"]
    ]
    return f"{name} {' | '.join(parts)}"


def is_fault(row: Row) -> bool:
    """Say whether a row holds no times for a reason that the reader must see."""
    return row.status in ("wrong", "failed")


def print_tables(console: Console, results: Sequence[CaseResult]) -> None:
    """Print kernel times and whole-call times, each where any were taken."""
    measured = [result for result in results if not result.skipped]
    rows = [row for result in measured for row in result.rows]
    if any(row.kernel for row in rows):
        console.print(_kernel_table(measured))
    if any(row.call for row in rows):
        console.print(_call_table(measured))
    if not measured:
        console.print("nothing was measured")
    for remark in remarks(results):
        console.print(remark, highlight=False, markup=False)


def remarks(results: Iterable[CaseResult]) -> list[str]:
    """Return what the tables have no room for, in words, each once."""
    found = []
    for result in results:
        if result.skipped:
            found.append(f"{result.case.name}: skipped, {result.skipped}")
        for row in result.rows:
            if row.path.startswith("torch"):
                found.append(f"{row.name} ran torch's own path ({row.path.partition(': ')[2]})")
            if is_fault(row):
                found.append(f"{result.case.name}: {row.name} {row.status}, {row.reason}")
            if row.status == "absent":
                found.append(f"{row.name} was left out: {row.reason}")
            found += [f"{result.case.name}: {row.name}, {flag}" for flag in row.flags]
    return list(dict.fromkeys(found))


def duration(milliseconds: float) -> str:
    """Return a time with three significant digits, in µs below one millisecond."""
    value, unit = (milliseconds, "ms") if milliseconds >= 1 else (milliseconds * 1e3, "µs")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} {unit}"


def _kernel_table(results: Sequence[CaseResult]) -> Table:
    table = Table(title="Kernel time, L2 cold: median ± half the quartiles' distance")
    table.add_column("case")
    table.add_column("implementation")
    for direction in ("forward", "backward"):
        for heading in (direction, "vs torch", "of floor"):
            table.add_column(heading, justify="right")
    table.add_column("worst error", justify="right")
    for result in results:
        torchs = result.row("torch")
        for index, row in enumerate(_shown(result)):
            cells = [result.case.name if index == 0 else "", row.name]
            for direction in ("forward", "backward"):
                own = row.kernel.get(direction)
                base = torchs.kernel.get(direction) if torchs else None
                floor = result.floor[direction]["ms"]
                cells += [
                    _time(own),
                    _ratio(base, own),
                    f"{floor / own.median_ms:.0%}" if own else "–",
                ]
            table.add_row(*cells, _worst_error(row))
        table.add_section()
    return table


def _call_table(results: Sequence[CaseResult]) -> Table:
    table = Table(title="Whole call in eager, host clock: median ± half the quartiles' distance")
    table.add_column("case")
    table.add_column("implementation")
    for heading in (
        *("forward, no grad", "vs torch", "forward", "vs torch", "forward + backward", "vs torch"),
        *("worst error", "peak memory"),
    ):
        table.add_column(heading, justify="right")
    for result in results:
        torchs = result.row("torch")
        for index, row in enumerate(_shown(result)):
            cells = [result.case.name if index == 0 else "", row.name]
            for name in ("no_grad", "forward", "both"):
                own = row.call.get(name)
                base = torchs.call.get(name) if torchs else None
                cells += [_time(own), _ratio(base, own)]
            memory = row.peak_memory_bytes
            shown = "–" if memory is None else f"{memory / 2**20:.1f} MiB"
            table.add_row(*cells, _worst_error(row), shown)
        table.add_section()
    return table


def _shown(result: CaseResult) -> list[Row]:
    return [row for row in result.rows if row.status != "absent"]


def _time(summary: Summary | None) -> str:
    if summary is None:
        return "–"
    spread = (summary.upper_quartile_ms - summary.lower_quartile_ms) / 2 / summary.median_ms
    mark = "" if summary.method in ("graph", "wall") else " (events)"
    return f"{duration(summary.median_ms)} ±{spread:.0%}{mark}"


def _ratio(base: Summary | None, own: Summary | None) -> str:
    return f"{base.median_ms / own.median_ms:.2f}x" if base and own else "–"


def _worst_error(row: Row) -> str:
    if is_fault(row):
        return row.status
    if not row.errors:
        return "–"
    output = max(row.errors, key=row.errors.__getitem__)
    return f"{row.errors[output]:.1e} ({output})"
