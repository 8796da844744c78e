"""What an asynchronous call returns."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError  # the built-in from 3.11 on

import torch


class Handle:
    """A call under way.

    Args:
        future: Of the call.
        interrupt: Called where a signal's handler raises while somebody waits.
    """

    def __init__(self, future: Future[None], interrupt: Callable[[], None] | None = None) -> None:
        self._future, self._interrupt = future, interrupt

    @property
    def future(self) -> Future[None]:
        """The call's own future."""
        return self._future

    def done(self) -> bool:
        """Say whether the call has ended, well or not."""
        return self._future.done()

    def exception(self) -> BaseException | None:
        """Return what the call raised; None while it is under way, and where it ended well."""
        return self._future.exception() if self._future.done() else None

    def wait(self, timeout: float | None = None) -> None:
        """Wait until the call has ended.

        Args:
            timeout: Seconds to wait for; the call goes on after them.

        Raises:
            PeerError: Another rank made the call impossible.
            TimeoutError: The call has not ended yet.
        """
        try:
            self._future.result(timeout)
        except FutureTimeoutError:
            if self._future.done() or timeout is None:
                raise
            raise TimeoutError(f"the call has not ended after {timeout:g} s") from None
        except BaseException:
            if self._interrupt is not None and not self._future.done():
                self._interrupt()  # as where a call that is waited for at once is interrupted
            raise

    def torch_future(self, value: object) -> torch.futures.Future[object]:
        """Return torch's kind of future, which holds `value` when the call has ended well."""
        ended: torch.futures.Future[object] = torch.futures.Future()
        problems: list[BaseException] = []

        def check(_: torch.futures.Future[object]) -> object:
            if problems:
                raise problems[0]
            return value

        # An error that `then` meets reaches whoever waits in C++; one set directly does not.
        result = ended.then(check)

        def finish(future: Future[None]) -> None:
            if (problem := future.exception()) is not None:
                problems.append(problem)
            ended.set_result(None)

        self._future.add_done_callback(finish)
        return result
