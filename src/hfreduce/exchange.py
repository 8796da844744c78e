"""How ranks find each other before they share memory: an all-gather of small texts.

Anything that can do that will serve. Here are the two that torch has: a store, and a process group.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from hfreduce.errors import LatePeerError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

# Gives everyone's text, by rank, for this rank's.
Exchange = Callable[[str], "list[str]"]


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

    def exchange(text: str) -> list[str]:
        nonlocal rounds
        prefix = f"hfreduce/{name}/{generation}/{rounds}"
        rounds += 1
        store.set(f"{prefix}/{rank}", text)
        keys = [f"{prefix}/{peer}" for peer in range(world_size)]
        left = max(0.001, deadline - time.monotonic())
        try:
            store.wait(keys, timedelta(seconds=left))
        except RuntimeError as error:
            missing = [peer for peer, key in enumerate(keys) if not _is_there(store, key)]
            if not missing:
                raise
            shown = ", ".join(map(str, missing))
            raise LatePeerError(
                f"rank {shown} did not come to make the group {name!r} within {timeout:g} s: "
                f"look for its error, or raise the timeout",
                missing[0],
            ) from error
        return [store.get(key).decode() for key in keys]

    return exchange


def through_group(group: dist.ProcessGroup | None) -> Exchange:
    """Return an exchange through a process group that exists already; None is the default one."""

    def exchange(text: str) -> list[str]:
        texts: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(texts, text, group=group)
        return texts

    return exchange


def _is_there(store: Store, key: str) -> bool:
    try:
        return bool(store.check([key]))
    except RuntimeError:  # the store's own server is gone
        return False
