"""What goes wrong between ranks, each with the rank to blame.

`Reason` has the numbers of the native engine (native/wait.hpp).
"""

from __future__ import annotations

import enum


class Reason(enum.IntEnum):
    """Why a collective did not end well."""

    NONE = 0
    DEAD = 1
    LATE = 2
    CLOSED = 3
    MISMATCH = 4
    INTERRUPTED = 5
    FORKED = 6
    NETWORK = 7


class PeerError(RuntimeError):
    """Another rank made a collective impossible; the group cannot be used any more.

    Attributes:
        rank: The rank to blame, in the group.
    """

    def __init__(self, message: str, rank: int = -1) -> None:
        super().__init__(message)
        self.rank = rank

    def __reduce__(self) -> tuple[type[PeerError], tuple[str, int]]:
        return type(self), (str(self), self.rank)


class DeadPeerError(PeerError, ConnectionError):
    """A rank's process is gone, or has closed the group, while others wait for it."""


class LatePeerError(PeerError, TimeoutError):
    """A rank did not reach a collective within the timeout."""


class MismatchError(PeerError):
    """Ranks called different collectives, or with different sizes or types."""


class UnavailableError(RuntimeError):
    """The ranks cannot share memory: they are on several machines, or the engine was not built."""


class SeveralNodesError(UnavailableError):
    """The ranks are on several machines, or in several spaces of process numbers."""


def first_line(error: BaseException) -> str:
    """Return what an error of torch's says, without its C++ frames."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
