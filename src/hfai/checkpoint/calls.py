"""What ranks must agree on before a checkpoint is committed, and how they find each other again.

Calls of ranks are paired by their count. So that a call which one rank made more or less than the
others makes no checkpoint of two steps, each rank's report has what it was called for, and rank 0
commits only where that is the same. Where ranks did not meet:

    rank 0 came alone     it leaves the key "ended"; a rank that comes later with another call knows
                          by it that it has no part in that save, and goes on to the next number
    another rank did      it counts the call back, so that its next one pairs with rank 0's next
    calls differed        ranks at an earlier step have their calls refused, uncounted, up to the
                          step that others had reached
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from hfai.checkpoint.errors import CheckpointError
from hfai.checkpoint.peers import NotComeError, Peers
from hfai.checkpoint.storage import Location

FAILED = "the save failed on "  # what ranks tell each other begins so
_DIFFER = f"{FAILED}ranks that do not agree: "
# Step, epoch, and the last part of the path: its beginning may differ between hosts.
Call = list[Any]


class DifferentCallsError(CheckpointError):
    """Ranks were called for different saves; `newest` is the latest of their steps, or None."""

    def __init__(self, newest: int | None, message: str) -> None:
        super().__init__(message)
        self.newest = newest


def call_of(location: Location, step: int | None, epoch: int | None) -> Call:
    """Return what a rank was called for."""
    return [step, epoch, os.path.basename(location.path.rstrip("/"))]


def need_same(calls: Sequence[Call], paths: Sequence[str]) -> None:
    """Refuse ranks that were called for different saves.

    Raises:
        CheckpointError: They were; names each kind of call, and the first rank of it.
    """
    if all(call == calls[0] for call in calls):
        return
    firsts = [rank for rank, call in enumerate(calls) if call not in calls[:rank]]
    said = [f"rank {rank} saves {_words(calls[rank], paths[rank])}" for rank in firsts[:8]]
    steps = [call[0] for call in calls]
    raise DifferentCallsError(
        max(steps) if all(type(step) is int for step in steps) else None,
        f"{_DIFFER}{'; '.join(said)}. Nothing was committed: let all ranks "
        "make the same calls, in the same order",
    )


def _words(call: Call, path: str) -> str:
    step, epoch, _ = call
    return f"step {step}{'' if epoch is None else f' of epoch {epoch}'} to {path}"


class Numbers:
    """Numbers of one rank's saves, which pair them with the other ranks'.

    Args:
        peers: The ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._last = 0
        self._left: Call | None = None  # counted back
        self._newest: int | None = None  # step that other ranks had reached
        self._why = ""

    def need_reached(self, call: Call) -> None:
        """Refuse a call that other ranks have behind them.

        Raises:
            CheckpointError: It is one.
        """
        newest = self._newest
        if newest is not None and type(call[0]) is int and call[0] <= newest:
            raise CheckpointError(
                f"step {call[0]} is not saved, others were at step {newest} already and all save "
                f"again behind it: {self._why}"
            )
        self._newest = None

    def next(self, call: Call | None) -> tuple[int, str]:
        """Return the number of a call (None: not known), and why it has failed already, or ""."""
        self._last += 1
        if self._peers.rank and self._peers.has("ended"):
            number, theirs, alone, text, _ = json.loads(self._peers.get("ended"))
            if number >= self._last:
                other = None not in (call, theirs) and call != theirs
                if other and (alone or theirs == self._left):
                    self._last = number + 1
                else:
                    self._last = number
                    return number, text
        return self._last, ""

    def failed(self, number: int, call: Call | None, text: str, error: BaseException) -> None:
        """Let ranks that did not come to a save find the next one."""
        alone = isinstance(error, NotComeError)
        if self._peers.rank == 0:
            newest = getattr(error, "newest", None)
            said = [number, call, alone, text, newest]
            self._peers.set("ended", json.dumps(said).encode())
            self._note(call, newest, text)
        elif text.startswith(_DIFFER) and self._peers.has("ended"):
            self._note(call, json.loads(self._peers.get("ended"))[4], text)
        elif alone and not any(
            self._peers.has(f"{number}/{key}") for key in ("names/0", "done/0", "outcome")
        ):
            self._last, self._left = number - 1, call

    def _note(self, call: Call | None, newest: int | None, why: str) -> None:
        if newest is not None and call is not None and call[0] < newest:
            self._newest, self._why = newest, why
