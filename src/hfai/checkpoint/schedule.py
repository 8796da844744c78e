"""Decisions that all ranks make alike at step boundaries: to save, and that a save has failed.

Both go through the group's store, and neither waits for a rank that is not at the boundary yet
longer than it takes to come there.
"""

from __future__ import annotations

import time

from hfai.checkpoint.handle import SaveHandle
from hfai.checkpoint.peers import Peers

_ENDED = 1 << 24  # the counter of a boundary: below, how many ranks were there; above, how many
# of them knew that the save had ended. So many ranks there are not.


class Schedule:
    """When a save is due.

    By time, rank 0 decides for all. It writes, at boundaries that all ranks know, whether to save
    now and how many calls later it will be asked again: half of what it takes until then at the
    speed since it was asked before, and never more than twice as many as the last time, since the
    first calls may come in no time. So the others read a key a few times a save and not every step.

    Args:
        peers: The ranks.
        every: Steps.
        minutes: Of rank 0's clock.

    Raises:
        ValueError: The minutes are not more than 0.
    """

    def __init__(self, peers: Peers, every: int | None, minutes: float | None) -> None:
        if minutes is not None and not minutes > 0:
            raise ValueError(f"minutes is {minutes!r}: give a number above 0, or None")
        self._peers, self._every, self._minutes = peers, every, minutes
        self._calls = self._asked = 0
        self._next = 1
        self._later = 1  # calls between the last two times that it was asked
        self._before = self._since = time.monotonic()

    @property
    def is_automatic(self) -> bool:
        """Whether saves come due at all."""
        return self._every is not None or self._minutes is not None

    def is_due(self, step: int) -> bool:
        """Whether to save at this boundary."""
        due = self._every is not None and step > 0 and step % self._every == 0
        return self._is_time() or due

    def saved(self, step: int) -> None:
        """Count time from now on."""
        self._since = time.monotonic()

    def _is_time(self) -> bool:
        if self._minutes is None:
            return False
        self._calls += 1
        if self._calls < self._next:
            return False
        self._asked += 1
        key = f"time/{self._asked}"
        if self._peers.rank == 0:
            now = time.monotonic()
            left = 60 * self._minutes - (now - self._since)
            each = (now - self._before) / self._later
            later = int(left / each / 2) if left > 0 and each > 0 else 1
            later = max(1, min(later, 2 * self._later))
            self._before = now
            self._peers.set(key, f"{int(left <= 0)} {later}".encode())
        text = self._peers.wait([key], "decide on a save")[0].decode()
        if self._peers.rank == 0:
            self._peers.forget(f"time/{self._asked - 4}")
        now_text, later_text = text.split()
        self._later = int(later_text)
        self._next = self._calls + self._later
        return now_text == "1"


class Watch:
    """Learns, on all ranks at the same boundary, that a save has ended.

    At each boundary a rank adds to a counter in the store that it was there, and whether its part
    has ended; at the next one it looks at that counter, when all have been there. So all ranks act
    on the same sum.

    Args:
        peers: The ranks.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._handle: SaveHandle | None = None
        self._boundary = 0
        self._before = ""

    def begin(self, handle: SaveHandle) -> None:
        """Watch a save."""
        self._handle = handle
        self._before = ""

    def end(self) -> None:
        """Stop watching."""
        self._handle = None

    def has_ended(self) -> bool:
        """Whether all ranks knew, one boundary ago, that the save had ended."""
        if self._handle is None:
            return False
        peers = self._peers
        if peers.world == 1:
            return self._handle.done()
        ended = False
        if self._before:
            deadline = time.monotonic() + peers.timeout
            while (count := peers.add(self._before, 0)) % _ENDED < peers.world:
                if time.monotonic() > deadline:
                    break  # whoever is late is late for the training too
                time.sleep(0.001)
            ended = count // _ENDED == peers.world
            peers.forget(f"boundary/{self._boundary - 2}")
        self._boundary += 1
        self._before = f"boundary/{self._boundary}"
        peers.add(self._before, 1 + (_ENDED if self._handle.done() else 0))
        return ended
