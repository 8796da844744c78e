"""Stopping in good order: the first Ctrl-C asks, the second ends the process at once.

A request to suspend (`hfai.client`: SIGTERM, SIGUSR1, a control file) asks in the same way, and
decides the exit code.

Python runs signal handlers in the main thread, between two bytecodes, and a long call into C++ such
as a backward pass puts them off until it returns. Signals are therefore taken from Python's wake-up
file descriptor, to which they are written the moment they come, by a thread that waits for them.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from hfai import client

SIGNALS = (signal.SIGINT, signal.SIGTERM)
SHOW_CURSOR = b"\x1b[?25h"


class StopRequest:
    """A context in which signals set `requested` instead of interrupting the work.

    SIGINT and SIGTERM do, and requests to suspend. A second SIGINT or SIGTERM ends the process with
    the exit code 128 + its number, whatever the main thread is doing. A SIGINT that was ignored on
    entry, as for a job that a shell put into the background, stays ignored. Must be entered in the
    main thread.

    Args:
        suspend_after: Send this process the request of a cluster engine, SIGUSR1, when `requested`
            is looked at after that many steps.

    Attributes:
        steps_done: How many steps the run has done.
    """

    def __init__(self, suspend_after: int | None = None) -> None:
        self.steps_done: Callable[[], int] = lambda: 0
        self._suspend_after = suspend_after
        self._interrupted = False
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> bool:
        """Whether the run shall end after this step."""
        if self._suspend_after is not None and self.steps_done() == self._suspend_after:
            self._suspend_after = None
            signal.raise_signal(signal.SIGUSR1)
        return self._interrupted or self.suspended

    @requested.setter
    def requested(self, value: bool) -> None:
        self._interrupted = value

    @property
    def suspended(self) -> bool:
        """Whether somebody has asked to suspend, and so will start the run again."""
        return client.heard() is not None

    def __enter__(self) -> StopRequest:
        reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)  # set_wakeup_fd asks for that
        self._watcher = threading.Thread(target=self._watch, args=(reader,), daemon=True)
        self._watcher.start()
        self._previous_fd = signal.set_wakeup_fd(self._writer)
        for number in SIGNALS:
            previous = signal.getsignal(number)
            if previous is not signal.SIG_IGN:
                self._previous[number] = previous
                signal.signal(number, _leave_to_the_watcher)
        client.listen()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        client.stop_listening()
        for number, previous in self._previous.items():
            signal.signal(number, previous)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._writer)  # the watcher reads an end of file
        self._watcher.join()

    def _watch(self, reader: int) -> None:
        while byte := os.read(reader, 1):
            if byte[0] in SIGNALS:
                if self._interrupted:
                    _end_at_once(byte[0])
                self._interrupted = True
        os.close(reader)


def _leave_to_the_watcher(number: int, frame: FrameType | None) -> None:
    """Do nothing: a signal needs some handler for its number to reach the wake-up descriptor."""


def _end_at_once(number: int) -> None:
    # A live line hides the cursor. Nothing is buffered or locked here: the main thread may hold
    # any lock, so only plain system calls are safe.
    for stream in (sys.stdout, sys.stderr):
        if stream.isatty():
            os.write(stream.fileno(), SHOW_CURSOR + b"\n")
            break
    os._exit(128 + number)
