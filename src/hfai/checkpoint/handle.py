"""A save that runs while the training goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from hfai.checkpoint import unheard
from hfai.checkpoint.errors import CheckpointError


class SaveHandle:
    """What `save_async` returns.

    Attributes:
        path: Of the checkpoint.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._done = threading.Event()
        self._staged = threading.Event()
        self._error: BaseException | None = None
        self._events: list[Any] = []  # of GPUs' streams, behind the last copy from each
        self._hooks: list[Any] = []
        self._thread: threading.Thread | None = None

    def done(self) -> bool:
        """Whether the save has ended, well or not."""
        return self._done.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the checkpoint is there.

        Args:
            timeout: Seconds; None: as long as it takes.

        Raises:
            CheckpointError: It could not be written, on this rank or another.
            TimeoutError: The time is up; the save goes on.
        """
        if not self._done.wait(timeout):
            raise TimeoutError(f"{self.path} is not written after {timeout:g} s")
        self._unguard()
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            unheard.forget(self)
            raise self._error

    def error(self) -> BaseException | None:
        """Return why the save failed; None where it did not, or has not ended."""
        unheard.forget(self)
        return self._error

    def wait_staged(self) -> None:
        """Wait until the state is copied, so that it may be changed.

        The optimizers that were given do it by themselves before their next step. Copies from a GPU
        are waited for by the GPU's current stream, not by the host.
        """
        self._staged.wait()
        for event in self._events:
            event.wait()

    def _guard(self, optimizers: list[Any]) -> None:
        """Let optimizers wait before their next step."""
        wait = _as_hook(self.wait_staged)
        self._hooks = [optimizer.register_step_pre_hook(wait) for optimizer in optimizers]

    def _unguard(self) -> None:
        """Let optimizers go; not from their hooks, over which torch is iterating then."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _set_staged(self, events: list[Any]) -> None:
        self._events = events
        self._staged.set()

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, Exception) and not isinstance(error, CheckpointError):
            kind = type(error).__name__
            wrapped = CheckpointError(f"{self.path} could not be written: {kind}: {error}")
            wrapped.__cause__ = error
            error = wrapped
        self._error = error
        if error is not None and self._thread is not None:
            unheard.note(self, error)
        self._staged.set()
        self._done.set()


def _as_hook(call: Callable[[], None]) -> Callable[..., None]:
    def hook(*arguments: Any) -> None:
        call()

    return hook
