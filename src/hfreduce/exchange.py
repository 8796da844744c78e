"""How ranks find each other before they share memory: an all-gather of small texts.

Anything that can do that will serve. Here are the two that torch has, a store and a process group,
and a reducer itself, which a second one is made with.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from hfreduce.errors import DeadPeerError, LatePeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hfreduce.reducer import Reducer

# Finds a rank whose process is dead, or None.
Watch = Callable[[], "int | None"]
# Gives everyone's text, by rank, for this rank's; may look in between whether all live.
Exchange = Callable[[str, "Watch | None"], "list[str]"]
_LOOK_EVERY = 0.25  # seconds


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
    generation = store.add(f"hfreduce/{name}/generation/{rank}", 1)
    deadline = time.monotonic() + timeout
    rounds = 0

    def exchange(text: str, watch: Watch | None) -> list[str]:
        nonlocal rounds
        prefix = f"hfreduce/{name}/{generation}/{rounds}"
        rounds += 1
        store.set(f"{prefix}/{rank}", text)
        keys = [f"{prefix}/{peer}" for peer in range(world_size)]
        while not _came(store, keys, min(_LOOK_EVERY, deadline - time.monotonic())):
            missing = [peer for peer, key in enumerate(keys) if not _is_there(store, key)]
            dead = watch() if watch is not None else None
            if dead in missing:
                raise DeadPeerError(f"rank {dead} died while the group {name!r} was made", dead)
            if missing and time.monotonic() > deadline:
                shown = ", ".join(f"rank {peer}" for peer in missing)
                raise LatePeerError(
                    f"{shown} did not come to make the group {name!r} within {timeout:g} s: look "
                    f"for its error, or raise the timeout",
                    missing[0],
                )
            time.sleep(0.01)  # a store whose server is gone answers at once, and nothing
        return [store.get(key).decode() for key in keys]

    return exchange


def through_group(group: dist.ProcessGroup | None) -> Exchange:
    """Return an exchange through a process group that exists already; None is the default one."""

    def exchange(text: str, watch: Watch | None) -> list[str]:
        texts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return exchange


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


def _came(store: Store, keys: list[str], seconds: float) -> bool:
    try:
        store.wait(keys, timedelta(seconds=max(0.001, seconds)))
    except RuntimeError:  # the time is over, or the store's own server is gone
        return False
    return True


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the store's own server is gone
        return False
