"""How far a long command is: nothing for two seconds, then a bar or, in a log, lines."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from typing_extensions import Self


class Progress:
    """Shows on stderr how much is done: a bar on a terminal, elsewhere a line now and then.

    Args:
        what: The command, for the display.
        total: How much there is to do; None where that is not known.
        after: Seconds before anything is shown.
        every: Seconds between lines.
        program: Whose lines they are.
    """

    def __init__(
        self,
        what: str,
        total: int | None,
        *,
        after: float = 2.0,
        every: float = 10.0,
        program: str = "ffrecord",
    ) -> None:
        self._what, self._total, self._program = what, total, program
        self._done = 0
        self._every = every
        self._next = time.monotonic() + after
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, count: int) -> None:
        """Add to what is done."""
        self._done += count
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done)
        elif time.monotonic() >= self._next:
            if sys.stderr.isatty():
                self._start_bar()
            else:
                self._next = time.monotonic() + self._every
                of = "" if self._total is None else f" of {self._total}"
                click.echo(f"{self._program}: {self._what}: {self._done}{of}", err=True)

    def set_total(self, total: int | None) -> None:
        """Say how much there is to do, where that is learned late."""
        self._total = total

    def _start_bar(self) -> None:
        from rich import progress
        from rich.console import Console

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeRemainingColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self._what, total=self._total, completed=self._done)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
