"""`hfai demo`: the options, their ranges, and the exit codes. The work is `hfai.demo.job`."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import MutableMapping
from pathlib import Path
from typing import Any

import click

from hfai.demo.request import EXIT_INTERRUPTED, HelperError, Request, UsageError

EXIT_CODES = """\b
Exit codes:
  0    finished, all checks passed
  1    a check failed, a process of --nprocs died or did not start, or an unexpected error
  2    the arguments contradict each other, the machine or the run to resume
  75   suspended (SIGTERM, SIGUSR1, the file HFAI_SUSPEND_FILE names, --suspend-after):
       start again with --resume
  130  stopped by Ctrl-C; what there was is written (130 or 143 without that after a second
       Ctrl-C or SIGTERM)
"""


@click.command(epilog=EXIT_CODES)
@click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="auto: a GPU where torch sees one.",
)
@click.option(
    "--precision",
    type=click.Choice(["auto", "fp32", "bf16"]),
    default="auto",
    show_default=True,
    help="bf16 is autocast over fp32 parameters; auto: bf16 on a GPU that has it.",
)
@click.option(
    "--model",
    type=click.Choice(["tiny", "base", "large", "lstm"]),
    help="A BERT of that size, or an LSTM.  [default: tiny on the CPU, base on a GPU]",
)
@click.option("--steps", type=click.IntRange(1, 10_000_000), help="Optimizer steps.")
@click.option("--batch-size", type=click.IntRange(1, 65_536), help="Windows of text in a step.")
@click.option("--length", type=click.IntRange(8, 8192), help="Bytes in a window.")
@click.option(
    "--learning-rate",
    type=click.FloatRange(0.0, 1.0, min_open=True),
    help="The peak of the schedule: a linear rise over a tenth of the steps, then a linear fall.",
)
@click.option(
    "--seed", type=click.IntRange(0, 2**63 - 1), help="Of weights and batches.  [default: 0]"
)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("hfai-demo"),
    show_default=True,
    help="The directory for loss.png, figures.json, model.pt and resume/.",
)
@click.option(
    "--nprocs",
    type=click.IntRange(1, 64),
    default=1,
    show_default=True,
    help="Processes that train together, each on its share of every batch (hfreduce).",
)
@click.option("--resume", is_flag=True, help="Go on with the stopped run in --out.")
@click.option(
    "--suspend-after",
    type=click.IntRange(1),
    metavar="STEP",
    help="Get the request of a cluster engine after this step: save, and exit with 75.",
)
@click.option("--json", is_flag=True, help="Print the figures as one JSON object, and only that.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def command(
    device: str,
    out: Path,
    nprocs: int,
    resume: bool,
    suspend_after: int | None,
    json: bool,
    debug: bool,
    **given: Any,
) -> None:
    """Train a small BERT or LSTM on Python's own sources and compare with plain torch.

    A BERT is pre-trained to fill in masked bytes, or an LSTM to guess each next one, with hfai's
    layers. At the end torch's layers
    and hfai's are timed in turn on the same batches, and the model is converted back, saved, and
    loaded into plain torch. Steps, batch size, length and learning rate have defaults that fit the
    model and the device; on two CPU cores the whole takes one to two minutes. Ctrl-C stops after
    the current step and writes what there is; a second Ctrl-C ends at once. SIGTERM, SIGUSR1 and a
    control file suspend, as a cluster engine does before it takes a machine (docs/suspend.md).
    """
    try:
        sys.exit(_run(device, out, nprocs, resume, suspend_after, json, given))
    except Exception as error:
        if debug:
            raise
        _explain(error, out)


def _run(
    device: str,
    out: Path,
    nprocs: int,
    resume: bool,
    suspend_after: int | None,
    json: bool,
    given: dict[str, Any],
) -> int:
    if nprocs > 1 and "LOCAL_RANK" in os.environ and os.environ.get("LOCAL_WORLD_SIZE", "1") != "1":
        raise UsageError(
            f"--nprocs {nprocs} was given, but LOCAL_RANK is set: torchrun has started several "
            f"processes already; run `hfai demo --nprocs {nprocs}` alone, without torchrun"
        )
    command_line = shlex.join(["hfai", *sys.argv[1:]])
    share_cores(os.environ)
    try:
        # torch takes seconds to import, and `hfai demo --help` needs none of it.
        from hfai.demo.job import run

        return run(Request(given, device, out, nprocs, resume, suspend_after, json, command_line))
    except KeyboardInterrupt:
        click.echo("Stopped before the first step: nothing was written.", err=True)
        return EXIT_INTERRUPTED


def share_cores(environment: MutableMapping[str, str]) -> None:
    """Let torch's threads sleep soon where they wait for each other, unless the user said else.

    GNU OpenMP lets them spin for milliseconds. Where another process uses a core as well, they spin
    through the time in which the thread they wait for could run: with one busy neighbour the
    default job fell from 50,000 tokens/s on two cores to 1,500. With this count, of a few
    microseconds, it does 48,000 alone and 20,000 beside the neighbour. It is read when torch is
    loaded.
    """
    if "OMP_WAIT_POLICY" not in environment:
        environment.setdefault("GOMP_SPINCOUNT", "2000")


def _explain(error: Exception, out: Path) -> None:
    """Turn an error into one line and an exit code."""
    if isinstance(error, BrokenPipeError):
        raise error  # click ends quietly where the reader of a pipe has gone
    if isinstance(error, UsageError):
        raise click.UsageError(str(error)) from error
    if isinstance(error, HelperError):
        raise click.ClickException(str(error)) from error
    if isinstance(error, MemoryError):
        raise click.ClickException(
            f"{error}; give a lower --batch-size or --length, or a smaller --model"
        ) from error
    if isinstance(error, OSError) and str(error.filename or out).startswith(str(out)):
        raise click.ClickException(f"{error}; choose another directory with --out") from error
    raise click.ClickException(
        f"{type(error).__name__}: {_first_sentence(error)} (add --debug for the traceback)"
    ) from error


def _first_sentence(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else "no message"
