"""`hfai doctor`: which parts are ready on this machine, and how to mend what is not."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict

import click

from hfai.doctor import CHECKS, Check, all_ready, diagnose

STYLE = {"ok": "green", "missing": "yellow", "broken": "red"}


@click.command()
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
@click.option("--debug", is_flag=True, help="Show the traceback of a check that failed.")
def command(as_json: bool, debug: bool) -> None:
    """Say which parts are ready on this machine, and how to mend what is not.

    A machine without a GPU is fine: there hfai runs torch's own code.

    Exit status: 0 every required part is ready, 1 one of them is not.
    """

    def on_error(error: Exception) -> None:
        if debug:
            traceback.print_exception(error)

    checks = list(diagnose(CHECKS, on_error))
    ready = all_ready(checks)
    if as_json:
        found = {"ready": ready, "checks": [asdict(check) for check in checks]}
        click.echo(json.dumps(found, indent=1, ensure_ascii=False))
    else:
        show(checks)
        if ready:
            gpu = any(c.name == "operators on the GPU" and c.status == "ok" for c in checks)
            click.echo(
                f"ready: {'hfai on the GPU' if gpu else 'everything, on torch paths: no GPU'}"
            )
        else:
            names = ", ".join(c.name for c in checks if c.required and c.status != "ok")
            click.echo(f"hfai is not ready: {names}", err=True)
    sys.exit(0 if ready else 1)


def show(checks: Sequence[Check]) -> None:
    """Print a line a check, and below each that is not ready what to do about it."""
    width = max(len(check.name) for check in checks)
    for check in checks:
        status = click.style(f"{check.status:<7}", fg=STYLE[check.status])
        click.echo(f"{status}  {check.name:<{width}}  {check.detail}")
        if check.remedy:
            click.echo(f"{'':<{width + 9}}  → {check.remedy}")
