"""Stopping in good order: the first Ctrl-C asks, the second ends the process at once."""

from __future__ import annotations

import os
import signal
import sys
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """A context in which SIGINT and SIGTERM set `requested` instead of interrupting the work.

    After the first signal both have their default effect again: a second one ends the process
    without waiting for anything. Signals that were ignored on entry, as for a job that a shell put
    into the background, stay ignored. Must be entered in the main thread.
    """

    def __init__(self) -> None:
        self.requested = False
        self._previous: dict[signal.Signals, Any] = {}

    def __enter__(self) -> StopRequest:
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, previous in self._previous.items():
            signal.signal(number, previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        for known in self._previous:
            signal.signal(known, signal.SIG_DFL)
        # A live line hides the cursor, and after a second signal nobody would show it again. Only
        # os.write is safe here: the signal may have come in the middle of a print.
        for stream in (sys.stdout, sys.stderr):
            if stream.isatty():
                os.write(stream.fileno(), SHOW_CURSOR)
