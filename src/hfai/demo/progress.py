"""What moves while the job runs: a live line in a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

import time
from collections import deque
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as RichProgress
from rich.text import Text

REFRESH_SECONDS = 0.1
PLAIN_LINE_SECONDS = 5.0
# Speed and time left come from this much of the past, so that they follow a changing load.
WINDOW_SECONDS = 10.0


class Progress:
    """Shows one phase at a time: how far it is, a figure, tokens/s and the time left.

    Nothing runs beside the job's own thread: the line is redrawn by `advance` itself. A context
    manager; leaving it gives the terminal back as it was.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: RichProgress | None = None
        if console.is_terminal and not console.is_dumb_terminal:
            self._live = RichProgress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.fields[figures]}"),
                console=console,
                auto_refresh=False,
            )
        self._last_shown = 0.0

    def __enter__(self) -> Progress:
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def begin(self, phase: str, unit: str, total: int, done: int = 0, tokens: int = 0) -> None:
        """Start a phase of `total` units, `done` of them behind us, of `tokens` tokens each."""
        self._phase, self._unit, self._total, self._done = phase, unit, total, done
        self._tokens = tokens
        self._history = deque([(time.perf_counter(), done)])
        self._last_shown = 0.0
        if self._live is not None:
            self._task = self._live.add_task(phase, total=total, completed=done, figures="")
            self._live.refresh()

    def advance(self, figure: str = "") -> None:
        """Count one unit as done, and show it if the last showing is long enough ago."""
        now = time.perf_counter()
        self._done += 1
        self._history.append((now, self._done))
        while len(self._history) > 2 and now - self._history[0][0] > WINDOW_SECONDS:
            self._history.popleft()
        interval = PLAIN_LINE_SECONDS if self._live is None else REFRESH_SECONDS
        if now - self._last_shown < interval and self._done < self._total:
            return
        self._last_shown = now
        figures = self._figures(figure)
        if self._live is None:
            self.say(f"{self._phase}: {figures}")
        else:
            self._live.update(self._task, completed=self._done, figures=figures, refresh=True)

    def say(self, line: str) -> None:
        """Print a line of its own, above the live one."""
        self._console.print(Text(line), soft_wrap=not self._console.is_terminal)

    def _figures(self, figure: str) -> str:
        (then, done_then), (now, _) = self._history[0], self._history[-1]
        rate = (self._done - done_then) / max(now - then, 1e-9)
        parts = [f"{self._unit} {self._done:>{len(str(self._total))}}/{self._total}"]
        if figure:
            parts.append(figure)
        if self._tokens:
            parts.append(f"{rate * self._tokens:,.0f} tokens/s")
        seconds = (self._total - self._done) / rate
        parts.append(f"{format_duration(seconds)} left")
        return "  ".join(parts)


def format_duration(seconds: float) -> str:
    """Write a duration as m:ss, or h:mm:ss from an hour on."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
