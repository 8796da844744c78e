"""What a run says before and after its progress line: a few lines, a short table, the files."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hfai.demo import check, figures, state
from hfai.demo.compare import Comparison, Side
from hfai.demo.corpus import Corpus
from hfai.demo.machine import describe_machine
from hfai.demo.outcome import Outcome
from hfai.demo.progress import format_duration
from hfai.demo.settings import Settings
from hfai.demo.state import RunState

CURVE_FILE_NAME = "loss.png"
MEBIBYTE = 2**20


def print_opening(
    console: Console,
    settings: Settings,
    device: torch.device,
    corpus: Corpus,
    resume_file: Path,
    saved: RunState | None,
) -> None:
    """Print what is about to be trained, on what, and whether that goes on with an earlier run."""
    machine = describe_machine(device)
    place = machine["gpu"] or f"{machine['cpu']}, {machine['torch_threads']} threads"
    text_bytes = corpus.training_bytes + corpus.held_out_bytes
    print_line(
        console,
        f"{settings.title} on {device.type} ({place}), {settings.precision}: "
        f"{settings.steps} steps of {settings.batch_size} x {settings.length} bytes, seed "
        f"{settings.seed}; text: Python's standard library, {text_bytes / 1e6:.1f} MB",
    )
    if corpus.note is not None:
        print_line(console, f"note: {corpus.note}")
    if saved is not None:
        print_line(console, f"going on after step {len(saved.losses)} of {settings.steps}")
    elif resume_file.exists():
        print_line(
            console,
            f"note: this new run will replace the stopped one in {resume_file}, which --resume "
            f"would go on with",
        )


def print_report(console: Console, outcome: Outcome, device: torch.device) -> None:
    """Print what the run came to; parts that it did not come to are left out or said to be so."""
    console.print()
    for line in _training_lines(outcome):
        print_line(console, line)
    if outcome.comparison is not None:
        console.print(_comparison_table(outcome.comparison, outcome, device))
    elif outcome.interrupted:
        print_line(console, "torch against hfai: not measured, the run was stopped before")
    for line in _layer_lines(outcome):
        print_line(console, line)
    for result in outcome.checks():
        verdict = "ok" if result.passed else "FAILED"
        print_line(console, f"{verdict}: {result.name} ({result.detail})")


def print_line(console: Console, line: str) -> None:
    """Print a line: wrapped between words in a terminal, in one piece everywhere else."""
    console.print(Text(line), soft_wrap=not console.is_terminal)


def _training_lines(outcome: Outcome) -> Iterator[str]:
    settings = outcome.settings
    steps = f"{len(outcome.losses)} of {settings.steps} steps"
    duration = format_duration(outcome.training_seconds)
    speed = outcome.training_tokens_per_second
    if not outcome.losses or speed is None:
        yield "trained: no step was finished"
        return
    yield f"trained: {steps} in {duration}, {speed:,.0f} tokens/s with data and progress"
    yield (
        f"loss:    from {outcome.losses[0]:.3f} to {outcome.last_loss:.3f} nats a byte "
        f"(guessing by byte frequency: {outcome.unigram:.3f})"
    )
    together = outcome.together
    if together is not None and together.waiting_share is not None:
        milliseconds = 1e3 * (together.step_seconds or 0.0)
        yield (
            f"waiting: {together.waiting_share:.1%} of a step of {milliseconds:.1f} ms, for the "
            f"average over {together.nprocs} processes (hfreduce)"
        )


def _comparison_table(comparison: Comparison, outcome: Outcome, device: torch.device) -> Table:
    ratios = comparison.ratios
    low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
    table = Table()
    for header in ("", "torch", "hfai", "hfai / torch [quartiles]"):
        table.add_column(Text(header), justify="left" if header == "" else "right")
    table.add_row(
        f"tokens/s, median of {len(ratios)}",
        f"{statistics.median(comparison.torch.tokens_per_second):,.0f}",
        f"{statistics.median(comparison.hfai.tokens_per_second):,.0f}",
        Text(f"{comparison.ratio:.3f}  [{low:.2f}, {high:.2f}]"),
    )
    sides = (comparison.torch, comparison.hfai)
    table.add_row("loss on held-out text", *(_loss(side) for side in sides), "")
    if device.type == "cuda":
        table.add_row("peak GPU memory", *(_mebibytes(side.peak_memory) for side in sides), "")
    else:
        table.add_row("peak memory, whole process", _mebibytes(outcome.peak_memory), "", "")
    return table


def _loss(side: Side) -> str:
    return "not measured" if side.loss is None else f"{side.loss:.4f}"


def _layer_lines(outcome: Outcome) -> Iterator[str]:
    swapped = ", ".join(f"{n} {name}" for name, n in outcome.swap.swapped.items())
    yield f"swapped: {swapped or 'no layer'}"
    for path in outcome.swap.paths:
        yield f"         {path.count} {path.layer} on {path.path}'s path: {path.reason}"
    if outcome.comparison is not None and all(p.path == "torch" for p in outcome.swap.paths):
        yield (
            "         both sides ran torch's code: the ratio is this machine's noise, and what it "
            "costs to choose the path"
        )


def _mebibytes(size: int | None) -> str:
    return "" if size is None else f"{size / MEBIBYTE:,.0f} MiB"


def draw_curve(console: Console, path: Path, outcome: Outcome) -> bool:
    """Write the picture of the losses, or say how to get one where matplotlib is missing.

    Returns:
        Whether there is a picture now.
    """
    if not outcome.losses:
        return False
    try:
        from hfai.demo.plot import draw_losses
    except ImportError as error:
        print_line(
            console,
            f"no {path.name}: matplotlib cannot be imported ({error}); to get the picture: "
            f"pip install matplotlib",
        )
        return False
    settings = outcome.settings
    title = f"{settings.title} on Python's standard library, {settings.precision}"
    draw_losses(path, outcome.losses, outcome.unigram, title)
    return True


def print_files(console: Console, out: Path, outcome: Outcome, has_curve: bool) -> None:
    """Name the files that this run has written, and how to go on with a stopped one."""
    files = {
        CURVE_FILE_NAME: has_curve,
        figures.FILE_NAME: True,
        check.FILE_NAME: outcome.round_trip is not None,
        state.FILE_NAME: outcome.interrupted,
    }
    written = [name for name, is_written in files.items() if is_written]
    print_line(console, f"written: {', '.join(written)} in {out}")
    if outcome.interrupted:
        print_line(
            console,
            f"stopped after step {len(outcome.losses)} of {outcome.settings.steps}: add --resume "
            f"to go on",
        )
