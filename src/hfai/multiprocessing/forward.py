"""The process that started the others passes a request to suspend on to them.

Cluster engines know the process they started and signal that one. It trains nothing; its children
do, and they know what to do about SIGTERM (`hfai.client`), or end by it if they have never asked.
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Forwarding:
    """A context in which this process's signals go to others; handlers are put back at its end.

    Handlers that were there are called too; a signal that is ignored stays ignored. In a thread
    other than the main one, where Python sets no handlers, it does nothing.
    """

    def __init__(self) -> None:
        self._pids: Sequence[int] | None = None
        self._came_early: list[int] = []
        self._previous: dict[int, Any] = {}

    def to(self, pids: Sequence[int]) -> None:
        """Say whom to; what came before goes to them now."""
        self._pids = pids
        while self._came_early:
            self._send(self._came_early.pop(0))

    def __enter__(self) -> Forwarding:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
                previous = signal.getsignal(number)
                if previous not in (signal.SIG_IGN, None):
                    self._previous[number] = previous
                    signal.signal(number, self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if self._pids is None:
            self._came_early.append(number)
        else:
            self._send(number)
        previous = self._previous[number]
        if callable(previous):
            previous(number, frame)

    def _send(self, number: int) -> None:
        for pid in self._pids or ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
