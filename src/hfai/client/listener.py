"""What this process hears: signals, and a control file that somebody makes.

A signal's handler only takes a note and calls the handler that was there before. Python runs it in
the main thread, between two bytecodes: one that comes during a backward pass is noted when that
returns, which is before the next step boundary. The file is looked at when somebody asks, at most
twice a second, since it may lie on a network's file system.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

_log = logging.getLogger("hfai.client")
FILE_EVERY = 0.5  # seconds between two looks at the control file


class Listener:
    """Notes requests to suspend.

    Args:
        signals: Signals that are requests.
        file: A control file; that it exists is a request. None: there is none.

    Attributes:
        heard: What was heard first, in words, or None.

    Raises:
        TypeError: `signals` is one signal alone.
        ValueError: One of them is no signal that a process can handle.
    """

    # The one whose handlers take notes, of all in this process.
    _listening: ClassVar[Listener | None] = None

    def __init__(self, signals: Iterable[signal.Signals], file: Path | None) -> None:
        if isinstance(signals, (int, str)):
            raise TypeError(f"signals is {signals!r}: give several, such as [signal.SIGTERM]")
        self.signals = tuple(_handleable(number) for number in signals)
        # The script may change its directory.
        self.file = file.absolute() if file is not None else None
        self.heard: str | None = None
        self._previous: dict[int, Any] = {}
        self._next_look = 0.0
        self._file_failed = False

    def start(self) -> None:
        """Handle the signals; handlers that were there are called too. In the main thread only."""
        Listener._listening = self
        for number in self.signals:
            previous = signal.getsignal(number)
            owner = getattr(previous, "__self__", None)
            if isinstance(owner, Listener):  # it stops as this one starts
                previous = owner._previous[number]
            if previous is None:
                _log.warning(
                    "%s is handled by native code, which Python cannot put back: it is left "
                    "alone and is no request to suspend",
                    number.name,
                )
                continue
            self._previous[number] = previous
            signal.signal(number, self._on_signal)

    def stop(self) -> None:
        """Put the handlers back that were there; one that was set later stays on top.

        In a thread other than the main one handlers stay, and only pass signals on.
        """
        self._be_deaf()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, previous)

    def ignore(self) -> None:
        """Ignore the signals, for the last moments of a process that has saved and ends.

        Python gives signals back their defaults while it ends, and one that is sent twice would
        then decide the exit code.
        """
        for number in self._previous:
            if signal.getsignal(number) == self._on_signal:
                signal.signal(number, signal.SIG_IGN)

    def leave_to_child(self) -> None:
        """In a forked child: be deaf, and let what was there before handle the signals again.

        A signal that would have ended a process by default ends the child too if it is SIGTERM,
        by which its parent may end it; others are requests that it ignores. By a handler, since
        what is ignored in itself stays so in programs that the child starts.
        """
        self._be_deaf()
        for number, previous in self._previous.items():
            if signal.getsignal(number) == self._on_signal:
                is_request_alone = previous == signal.SIG_DFL and number != signal.SIGTERM
                signal.signal(number, _ignore if is_request_alone else previous)

    def listen(self) -> str | None:
        """Return what was heard, after a look at the control file where it is time for one."""
        if self.heard is None and self.file is not None:
            now = time.monotonic()
            if now >= self._next_look:
                self._next_look = now + FILE_EVERY
                if self._file_is_there(self.file):
                    self.heard = f"the file {self.file}"
        return self.heard

    def take_file_away(self) -> None:
        """Remove the control file, so that the job that is started again does not find it."""
        if self.file is None:
            return
        try:
            self.file.unlink(missing_ok=True)
        except OSError as error:
            _log.warning("%s; remove it, or the next run suspends at once", error)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        # Another one that starts just now may have no handler yet.
        listening = Listener._listening
        if listening is not None and number in listening.signals and listening.heard is None:
            listening.heard = signal.Signals(number).name
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)
        elif Listener._listening is None and previous == signal.SIG_DFL:
            # Someone has kept this handler to call it, and nobody listens any more.
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def _be_deaf(self) -> None:
        if Listener._listening is self:
            Listener._listening = None

    def _file_is_there(self, file: Path) -> bool:
        try:
            os.lstat(file)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            if not self._file_failed:
                self._file_failed = True
                _log.warning("the control file cannot be looked at: %s", error)
            return False
        return True


def _handleable(number: Any) -> signal.Signals:
    try:
        found = signal.Signals(number)
    except ValueError:
        raise ValueError(f"{number!r} is no signal: give signal.SIGTERM or the like") from None
    if found in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError(f"{found.name} cannot be handled by any process: give another signal")
    return found


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
