"""How the ranks of a save tell each other what they must: small texts in the group's store.

No collective is made, on no group: a rank writes a key and goes on. Where it must know something,
it looks for keys, a moment apart, until they are there or the time is up; it never waits inside the
store, whose other users would have to wait with it. One process alone needs no store.
"""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from hfai.checkpoint.errors import CheckpointError

TIMEOUT = 1800.0  # seconds


class NotComeError(CheckpointError):
    """A rank has not come in time."""


# Seconds between two looks: at first; at last, for each rank, so that many do not keep the store
# busy; and at most.
_PAUSES = 0.0002, 0.0005, 0.05
_lock = threading.Lock()
_uses: dict[str, int] = {}  # of each group in this process, so that keys are new each time


class Peers:
    """The ranks that save or load together.

    All of them must make it, in the same order as others of the same group.

    Args:
        group: The process group; None: the default one, or this process alone where there is none.
        timeout: Seconds that one rank waits for the others.

    Attributes:
        rank: In the group.
        world: How many ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, timeout: float = TIMEOUT) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}: give seconds, more than 0")
        self.timeout = timeout
        self.rank, self.world = 0, 1
        self._ref: Any = None
        if dist.is_available() and dist.is_initialized():
            self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
            if self.rank < 0:
                raise ValueError("this process is no rank of the group: only its ranks call this")
        self._local: dict[str, bytes] = {}
        if self.world > 1:
            self._use(*_store_of(group))

    @classmethod
    def of_store(cls, store: Any, rank: int, world: int, timeout: float = TIMEOUT) -> Peers:
        """Return ranks that share a store and are no process group; the caller keeps the store."""
        peers = cls.__new__(cls)
        peers.timeout, peers.rank, peers.world = timeout, rank, world
        peers._local, peers._ref = {}, None
        if world > 1:
            peers._use(store, "store")
        return peers

    def _use(self, store: Any, name: str) -> None:
        # Weak: a store that outlives its group keeps its port.
        self._ref = weakref.ref(store)
        with _lock:
            _uses[name] = use = _uses.get(name, 0) + 1
        self._prefix = f"hfai-checkpoint/{name}/{use}/"

    @property
    def _store(self) -> Any:
        """The store; None where there is one rank."""
        if self._ref is None:
            return None
        store = self._ref()
        if store is None:
            raise CheckpointError("the process group is gone: save before destroy_process_group")
        return store

    def alive(self) -> bool:
        """Whether the store is still there."""
        return self._ref is None or self._ref() is not None

    def hold(self) -> Any:
        """Return what keeps the store alive as long as it is held."""
        return self._store

    def set(self, key: str, text: bytes) -> None:
        """Write a key."""
        if self._store is None:
            self._local[key] = text
            return
        with _lost_store():
            self._store.set(self._prefix + key, text.decode("latin-1"))

    def has(self, key: str) -> bool:
        """Whether a key was written."""
        if self._store is None:
            return key in self._local
        with _lost_store():
            return bool(self._store.check([self._prefix + key]))

    def get(self, key: str) -> bytes:
        """Return a key that was written."""
        if self._store is None:
            return self._local[key]
        with _lost_store():
            found: bytes = self._store.get(self._prefix + key)
            return found.decode().encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins as 0; return the sum."""
        if self._store is None:
            total = int(self._local.get(key, b"0")) + amount
            self._local[key] = str(total).encode()
            return total
        with _lost_store():
            return int(self._store.add(self._prefix + key, amount))

    def forget(self, key: str) -> None:
        """Remove a key, where the store can."""
        self._local.pop(key, None)
        if self._store is not None:
            # Some stores cannot remove; and where the server is gone, so is the key.
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(self._prefix + key)

    def wait(
        self, keys: Sequence[str], what: str, look: Callable[[str, bytes], None] | None = None
    ) -> list[bytes]:
        """Return what the ranks have written, as soon as all is there.

        Args:
            keys: One for each rank that must write.
            what: What they are doing, for the message.
            look: Called with each key and its text as they come; may raise.

        Raises:
            CheckpointError: Some were not written in time, or the store is gone.
        """
        deadline, pause = time.monotonic() + self.timeout, _PAUSES[0]
        found: dict[str, bytes] = {}
        while True:
            for key in keys:
                if key not in found and self.has(key):
                    found[key] = self.get(key)
                    if look is not None:
                        look(key, found[key])
            if len(found) == len(keys):
                return [found[key] for key in keys]
            if time.monotonic() > deadline:
                late = [key.rpartition("/")[2] for key in keys if key not in found]
                late = ["0" if key in ("token", "outcome") else key for key in late]
                who = ", ".join(f"rank {rank}" for rank in late[:8])
                raise NotComeError(
                    f"{who} did not come to {what} within {self.timeout:g} s: look for its error, "
                    "or raise the timeout"
                )
            time.sleep(pause)
            pause = min(2 * pause, self.world * _PAUSES[1], _PAUSES[2])


@contextlib.contextmanager
def _lost_store() -> Any:
    try:
        yield
    except RuntimeError as error:  # torch's DistError and what it raises without that name
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(
            f"the store through which the ranks speak does not answer ({line}): rank 0 may be dead"
        ) from error


def _store_of(group: dist.ProcessGroup | None) -> tuple[Any, str]:
    """Return a group's store, and a name for the group.

    torch has no public way to it; `_world` has been there since 2.0.
    """
    world = getattr(distributed_c10d, "_world", None)
    key = dist.group.WORLD if group is None else group
    entry = world.pg_map.get(key) if world is not None else None
    if entry is None or entry[1] is None:
        raise CheckpointError("the process group has no store: make it by init_process_group")
    return entry[1], str(world.pg_names.get(key, "default")) if world is not None else "default"
