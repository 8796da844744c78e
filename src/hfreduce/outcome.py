"""How a native call ended, in words."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hfreduce.dtypes import DTYPES, OPS
from hfreduce.errors import DeadPeerError, LatePeerError, MismatchError, PeerError, Reason

if TYPE_CHECKING:
    from hfreduce._engine import Group

KINDS = (
    "barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "reduce_scatter",
    "gather",
    "scatter",
)
REDUCING = {"all_reduce", "reduce", "reduce_scatter"}
WITH_ROOT = {"reduce", "broadcast", "gather", "scatter"}


def check(
    ended: tuple[int, int, bool],
    group: Group,
    labels: list[str],
    rank: int,
    what: str,
    timeout: float,
) -> None:
    """Raise what a native call ended with; return where it ended well.

    Args:
        ended: (reason, rank to blame, whether another rank found out).
        group: The engine's group.
        labels: How messages call each rank.
        rank: This rank.
        what: The name of the call.
        timeout: Seconds.
    """
    reason, blamed, told = Reason(ended[0]), ended[1], ended[2]
    if reason is Reason.NONE:
        return
    who = labels[blamed] if 0 <= blamed < len(labels) else f"rank {blamed}"
    if reason is Reason.CLOSED and (blamed < 0 or blamed == rank):
        raise RuntimeError(f"{what}: this Reducer is closed: make a new one on all ranks")
    if reason is Reason.FORKED:
        raise RuntimeError(f"{what}: this Reducer belongs to the process that forked this one")
    if reason is Reason.DEAD:
        raise DeadPeerError(f"{what}: {who} is dead: look for its own error or signal", blamed)
    if reason is Reason.CLOSED:
        raise DeadPeerError(f"{what}: {who} has left the group while others wait for it", blamed)
    if reason is Reason.LATE:
        if blamed == rank:
            text = f"this {who} was late: others waited {timeout:g} s for it and gave up"
        else:
            text = (
                f"{who} did not come within {timeout:g} s: it hangs, or has more to do than the "
                f"timeout allows"
            )
        raise LatePeerError(f"{what}: {text}", blamed)
    if reason is Reason.INTERRUPTED:
        raise PeerError(f"{what}: {who} was interrupted in the middle of a collective", blamed)
    if reason is Reason.NETWORK:
        raise DeadPeerError(f"{what}: {who} lost another node: look for its own error", blamed)
    if told:
        raise MismatchError(
            f"{what}: the ranks called different things; {who} differs from another rank, which "
            f"says how",
            blamed,
        )
    raise MismatchError(
        f"{what}: {who} called {_described(group.mismatch)} instead, or with other sizes: all "
        f"ranks make the same calls in the same order",
        blamed,
    )


def _described(call: tuple[int, int, int, int, int]) -> str:
    kind, dtype, op, root, count = call
    name = KINDS[kind]
    if name == "barrier":
        return name
    types = {number: str(known).removeprefix("torch.") for known, number in DTYPES.items()}
    if name in REDUCING:
        operation = next(known for known, number in OPS.items() if number == op)
        text = f"{name} ({operation}) of {count} {types[dtype]}"
    else:
        text = f"{name} of {count} bytes"
    return f"{text}, root {root}" if name in WITH_ROOT else text
