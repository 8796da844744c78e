"""How ranks find each other before they share memory: an all-gather of small texts.

Anything that can do that will serve. Here are the two that torch has, a store and a process group,
and a reducer itself, which a second one is made with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist
from torch.distributed import distributed_c10d

from hfreduce.errors import DeadPeerError, LatePeerError, first_line

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hfreduce.reducer import Reducer

# Finds the ranks whose processes are dead.
Watch = Callable[[], "list[int]"]
# Gives everyone's text, by rank, for this rank's; may look in between whether all live.
Exchange = Callable[[str, "Watch | None"], "list[str]"]
_PAUSES = 0.001, 0.05  # seconds between two looks at the store, at first and at last


def through_store(store: Store, rank: int, world_size: int, name: str, timeout: float) -> Exchange:
    """Return an exchange through a torch store.

    Ranks that use a name again, all in the same order, get keys of their own each time.

    Args:
        store: That all ranks reach.
        rank: This rank.
        world_size: The number of ranks.
        name: What the keys begin with.
        timeout: Seconds that all rounds together may take.
    """
    deadline = time.monotonic() + timeout
    rounds, generation = 0, 0

    def exchange(text: str, watch: Watch | None) -> list[str]:
        nonlocal rounds, generation
        try:
            if not rounds:
                generation = store.add(f"hfreduce/{name}/generation/{rank}", 1)
            prefix = f"hfreduce/{name}/{generation}/{rounds}"
            rounds += 1
            store.set(f"{prefix}/{rank}", text)
            keys = [f"{prefix}/{peer}" for peer in range(world_size)]
            pause, longest = _PAUSES
            # No store.wait: where it ends by its time, some stores log a warning each time.
            while not store.check(keys):
                dead = watch() if watch is not None else []
                late = time.monotonic() > deadline
                if dead or late:
                    _raise_missing(store, keys, dead, late)
                time.sleep(pause)
                pause = min(2 * pause, longest)
            return [store.get(key).decode() for key in keys]
        except (DeadPeerError, LatePeerError):
            raise
        except RuntimeError as error:  # the store's server is gone, mostly with rank 0
            if watch is not None and (dead := dying(watch)):  # some may be so for the others' death
                raise DeadPeerError(_died(dead, name), dead[0]) from error
            raise ConnectionError(
                f"the store by which the group {name!r} is made is gone: look for the error of the "
                f"process that serves it, mostly rank 0 ({first_line(error)})"
            ) from error

    def _raise_missing(store: Store, keys: list[str], dead: list[int], late: bool) -> None:
        missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        # One that has said its part may be gone: it was told of another's death.
        lost = next((peer for peer in dead if peer in missing), None)
        if lost is not None:
            raise DeadPeerError(_died([lost], name), lost)
        if missing and late:
            shown = ", ".join(f"rank {peer}" for peer in missing)
            raise LatePeerError(
                f"{shown} did not come to make the group {name!r} within {timeout:g} s: "
                f"look for its error, or raise the timeout",
                missing[0],
            )

    return exchange


def dying(watch: Watch, rank: int | None = None, seconds: float = 1.0) -> list[int]:
    """Return the ranks that are dead, or that turn out to be within a moment.

    A process's files and connections go before it counts as dead: of one that has used a GPU by the
    driver's time, some tenths of a second.

    Args:
        watch: Finds them.
        rank: Wait for this one to be among them; None: for any.
        seconds: How long.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        dead = watch()
        if dead and (rank is None or rank in dead):
            break
        time.sleep(0.01)
    return dead


def _died(ranks: list[int], name: str) -> str:
    shown = " and ".join(f"rank {rank}" for rank in ranks)
    return f"{shown} died while the group {name!r} was made"


def through_group(group: dist.ProcessGroup | None, timeout: float) -> Exchange:
    """Return an exchange between the ranks of a process group; None is the default one.

    It uses the group's store where there is one. A collective of gloo leaves a tensor to gloo's
    thread, which needs the GIL to drop it, and torch 2.13 joins that thread with the GIL held: a
    group that ends within some milliseconds of the collective would hang.
    """
    store = store_of(group)
    if store is not None:
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        return through_store(store, rank, world_size, "of a process group", timeout)

    def exchange(text: str, watch: Watch | None) -> list[str]:
        texts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return exchange


def store_of(group: dist.ProcessGroup | None) -> Store | None:
    """Return the store of a process group, None for the default one's, where torch keeps it."""
    found = getattr(distributed_c10d, "_world", None)
    of_group = found.pg_map.get(dist.group.WORLD if group is None else group) if found else None
    return of_group[1] if of_group is not None else None


def timeout_of(group: dist.ProcessGroup | None) -> timedelta | None:
    """Return the timeout of a process group, or None where it does not say."""
    theirs: object = dist.group.WORLD if group is None else group
    own = getattr(theirs, "_timeout", None)  # hfreduce's
    if isinstance(own, timedelta):
        return own
    for device in getattr(theirs, "_device_types", ()):
        with suppress(AttributeError, RuntimeError):  # not all backends have options
            found = theirs._get_backend(device).options._timeout  # type: ignore[attr-defined]
            if isinstance(found, timedelta) and found > timedelta():
                return min(found, timedelta(days=365))  # some groups' have no end
    return None


def through_collectives(group: Reducer) -> Exchange:
    """Return an exchange through a reducer that exists already."""

    def exchange(text: str, watch: Watch | None) -> list[str]:
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        sizes = torch.empty(group.world_size, dtype=torch.int64)
        group.all_gather(sizes, torch.tensor([data.numel()]))
        parts = [torch.empty(size, dtype=torch.uint8) for size in sizes.tolist()]
        group.all_gather(parts, data)
        return [bytes(part.tolist()).decode().strip() for part in parts]

    return exchange


def when_there(store: Store, key: str, deadline: float, who: str) -> str:
    """Return what a store has under a key, when somebody has set it.

    The store's own `get` waits for as long as the store was told to when it was made.

    Args:
        store: That all ranks reach.
        key: That another rank sets.
        deadline: Of time.monotonic().
        who: Sets it, for the message.

    Raises:
        RuntimeError: torch's, where the store's server is gone.
        TimeoutError: Nobody has by then.
    """
    pause, longest = _PAUSES
    while not store.check([key]):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{who} did not come, or failed before: look for its error")
        time.sleep(pause)
        pause = min(2 * pause, longest)
    return store.get(key).decode()
