"""How ranks agree at which step boundary they stop, without waiting for each other.

Ranks count their boundaries, and all come to the same ones. One that has heard a request writes so
into the store that torch.distributed has for its ranks to meet at; no collective runs, and the
GPUs' group has no part in it. Until then a rank looks into the store a few times a second.

While a request is under way, each rank that knows of it promises at a boundary k "I look here
again before I pass boundary k". The largest promise, the horizon, is one number in the store, only
ever raised, by compare-and-set. Once every rank has made a promise, somebody sets a mark beside the
number by compare-and-set as well, and that number is the boundary at which all stop. A rank passes
a boundary only after it has raised the horizon beyond it; where the mark is there first, that
fails. So no rank has passed the horizon when the mark is set, however far some run ahead of others.

Nobody waits for a rank that comes late, so ranks cannot deadlock: those that have agreed to nothing
go on training. Only the first to know linger, for as long as a step takes and a second at most,
because a signal that goes to all ranks may then stop them at this boundary and not at the next.
"""

from __future__ import annotations

import logging
import time
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

_log = logging.getLogger("hfai.client")
LOOK_EVERY = 0.25  # seconds between two looks into the store: some 0.1 ms each
LINGER = 1.0  # seconds at most, once
_LEAST_LINGER = 0.02  # seconds, where steps are shorter
# Ranks that have made no call this long after another's first will make none: in scripts of the
# original only rank 0 asks.
JOIN_PATIENCE = 30.0
_PAUSE = 0.005
_MARK = "!"


class Agreement:
    """One rank's part.

    Args:
        store: That all ranks reach; it is not kept alive, since it keeps a port.
        rank: This rank.
        world_size: The number of ranks.
        linger: Seconds at most that the first to know of a request wait for the others at a
            boundary.
        join_patience: Seconds after which ranks that have made no call are left out.

    Attributes:
        rank: This rank.
        stop_at: The boundary at which all stop, once that is settled; boundaries count from 1.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        linger: float = LINGER,
        join_patience: float = JOIN_PATIENCE,
    ) -> None:
        self._store_reference = weakref.ref(store)
        self.rank = rank
        self._world_size = world_size
        self._linger = linger
        self._join_patience = join_patience
        # Ranks that use a store again, all in the same order, get keys of their own each time.
        generation = store.add(f"hfai/suspend/generation/{rank}", 1)
        self._prefix = f"hfai/suspend/{generation}"
        self._horizon_key = f"{self._prefix}/horizon"
        store.set(f"{self._prefix}/joined/{rank}", "")
        store.add(f"{self._prefix}/joined", 1)
        self._joined_at = time.monotonic()
        self._boundary = 0
        self._boundary_at = self._joined_at
        self._next_look = 0.0
        self._known_since: float | None = None
        self._horizon = ""
        self.stop_at: int | None = None
        self._store_failed = False

    def at_boundary(self, heard: str | None, timeout: float) -> bool:
        """Count a boundary and say whether all ranks stop at it.

        Args:
            heard: What this rank itself has heard, in words.
            timeout: Seconds from when this rank knew of a request until all must be agreed.

        Raises:
            TimeoutError: A rank has not come to a boundary since; it is named.
        """
        self._boundary += 1
        now = time.monotonic()
        self._step_seconds, self._boundary_at = now - self._boundary_at, now
        if self.stop_at is None and not self._store_failed:
            try:
                if self._known_since is not None or self._is_asked(heard):
                    self._settle(timeout)
            except RuntimeError as error:  # what torch raises for a store whose server has gone
                self._store_failed = True
                _log.warning(
                    "the store that ranks meet at does not answer (%s): the rank that serves it "
                    "has ended, it seems, and no suspension can be agreed to any more",
                    (str(error) or type(error).__name__).splitlines()[0],
                )
        return self.stop_at is not None and self._boundary >= self.stop_at

    @property
    def _store(self) -> Store:
        store = self._store_reference()
        if store is None:
            raise RuntimeError("the process group was destroyed")
        return store

    @property
    def reason(self) -> str:
        """Who heard what first."""
        key = f"{self._prefix}/reason"
        try:
            return self._store.get(key).decode() if self._store.check([key]) else "a request"
        except RuntimeError:
            return "a request"

    def leave(self, patience: float) -> None:
        """Wait until all ranks that have agreed come here too, or until `patience` is over.

        A launcher that sees one rank end may kill the others in what they are still writing.
        """
        deadline = time.monotonic() + patience
        try:
            staying = self._store.add(f"{self._prefix}/ready", 0)
            left = self._store.add(f"{self._prefix}/left", 1)
            while left < staying and time.monotonic() < deadline:
                time.sleep(_PAUSE)
                left = self._store.add(f"{self._prefix}/left", 0)
        except RuntimeError:
            return  # the rank that serves the store has seen all come, and gone

    def _is_asked(self, heard: str | None) -> bool:
        """Say whether there is a request, and take note if so."""
        now = time.monotonic()
        if heard is None:
            if now < self._next_look:
                return False
            self._next_look = now + LOOK_EVERY
            if not self._store.check([self._horizon_key]):
                return False
        else:
            text = f"rank {self.rank} heard {heard}"
            self._store.compare_set(f"{self._prefix}/reason", "", text)
        self._known_since = now
        return True

    def _settle(self, timeout: float) -> None:
        """Promise, settle the boundary if all have, and raise the horizon if they have not."""
        is_first = self._horizon == ""
        self._raise_horizon(self._boundary)
        if is_first and self.stop_at is None:
            self._store.set(f"{self._prefix}/ready/{self.rank}", "")
            self._store.add(f"{self._prefix}/ready", 1)
        until = time.monotonic()
        if is_first:
            until += min(self._linger, max(self._step_seconds, _LEAST_LINGER))
        while self.stop_at is None:
            if self._all_are_ready():
                self._set_mark()
            elif time.monotonic() >= until:
                break
            else:
                time.sleep(_PAUSE)
        if self.stop_at is None:
            self._raise_horizon(self._boundary + 1)
        if self.stop_at is None:
            assert self._known_since is not None
            if time.monotonic() - self._known_since > timeout:
                raise TimeoutError(self._name_missing(timeout))

    def _raise_horizon(self, boundary: int) -> None:
        """Raise the horizon to `boundary` at least, or learn that it is settled."""
        expected, wanted = self._horizon, str(boundary)
        if expected and int(expected) >= boundary:
            wanted = expected  # compares with itself: tells whether the mark is there
        while True:
            self._horizon = self._store.compare_set(self._horizon_key, expected, wanted).decode()
            if self._horizon.endswith(_MARK):
                self.stop_at = int(self._horizon[: -len(_MARK)])
                return
            if int(self._horizon) >= boundary:
                return
            expected, wanted = self._horizon, str(boundary)

    def _set_mark(self) -> None:
        while self.stop_at is None:
            marked = self._horizon + _MARK
            found = self._store.compare_set(self._horizon_key, self._horizon, marked).decode()
            if found.endswith(_MARK):
                self.stop_at = int(found[: -len(_MARK)])
            self._horizon = found

    def _all_are_ready(self) -> bool:
        ready = self._store.add(f"{self._prefix}/ready", 0)
        if ready >= self._world_size:
            return True
        if time.monotonic() - self._joined_at < self._join_patience:
            return False
        if ready < self._store.add(f"{self._prefix}/joined", 0):
            return False
        absent = [r for r in range(self._world_size) if not self._has("joined", r)]
        _log.warning(
            "suspending without %s, which have never called receive_suspend_command()",
            _ranks(absent),
        )
        return True

    def _name_missing(self, timeout: float) -> str:
        missing = [rank for rank in range(self._world_size) if not self._has("ready", rank)]
        return (
            f"{_ranks(missing)} did not come to a step boundary within {timeout:g} s of the "
            f"request to suspend ({self.reason}): look for its error there, and let every rank "
            f"call receive_suspend_command() or try_save() at the same steps"
        )

    def _has(self, what: str, rank: int) -> bool:
        return bool(self._store.check([f"{self._prefix}/{what}/{rank}"]))


def _ranks(ranks: list[int]) -> str:
    """Name ranks; of many, the first few."""
    shown = ", ".join(f"rank {rank}" for rank in ranks[:8])
    return shown + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "") or "no rank"
