"""How the ranks of a node come to share memory.

Rank 0 makes it, the others open it through /proc, and once all have mapped it nothing is left of it
but the mappings: no name in /dev/shm at any time, so nothing to leak, to guess or to collide.
See native/segment.hpp for what lies in it.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from dataclasses import dataclass
from typing import Any

from hfreduce import topology
from hfreduce.errors import DeadPeerError, SeveralNodesError, UnavailableError
from hfreduce.exchange import Exchange, Watch, dying

try:
    from hfreduce import _engine

    MISSING = ""
except ImportError as error:
    MISSING = str(error)

DIRECT_BYTES = 32 << 10
SLOTS = 4
CHUNK_BYTES = 512 << 10
LEAST_CHUNK_BYTES = 64 << 10
MOST_RANKS = 512
# How long a rank looks before it sleeps: some microseconds, or where ranks share processors not at
# all. Measured on two busy cores: looking for 40 µs, as for 400, made small calls 3 to 20 times
# slower, because the scheduler favours who slept over who waited busily.
PATIENCE = {"pauses": 100, "yields": 0}
IMPATIENCE = {"pauses": 0, "yields": 2}
# What opening a file of a process that is gone, or going, fails with.
_OF_THE_DEAD = {errno.ENOENT, errno.ESRCH, errno.ESTALE, errno.EACCES, errno.EPERM}


@dataclass(frozen=True)
class Settings:
    """How a group's memory is laid out; rank 0's count for all.

    Attributes:
        chunk_bytes: Of each slot: what is put, combined and taken at a time.
        threads: That each rank works with.
        slots: Chunks that may be under way at a time.
        direct_bytes: Up to which every rank adds a whole all-reduce for itself.
    """

    chunk_bytes: int = CHUNK_BYTES
    threads: int = 1
    slots: int = SLOTS
    direct_bytes: int = DIRECT_BYTES


@dataclass(frozen=True)
class Member:
    """A rank as the others see it."""

    node: str
    pid: int
    start: int
    processors: int
    label: str
    missing: str


def is_available() -> bool:
    """Say whether the native engine is there: it is built on Linux, with a C++ compiler."""
    return not MISSING


def default_threads(processors: int, local_ranks: int, most: int = 4) -> int:
    """Return how many threads each rank works with where nothing else is said."""
    return max(1, min(most, processors // local_ranks // 2))


def me(label: str) -> Member:
    """Return what the others need to know of this process."""
    pid = os.getpid()
    start = -1 if MISSING else _engine.start_time(pid)
    return Member(topology.node(), pid, start, topology.processors(), label, MISSING)


def meet(exchange: Exchange, label: str) -> list[Member]:
    """Return all ranks, by rank.

    Raises:
        UnavailableError: They cannot share memory, SeveralNodesError where they are on several
            nodes: all ranks raise it.
    """
    mine = json.dumps(me(label).__dict__)
    members = [Member(**json.loads(text)) for text in exchange(mine, None)]
    check_engines(members)
    other = next((member for member in members if member.node != members[0].node), None)
    if other is not None:
        raise SeveralNodesError(
            f"{members[0].label} and {other.label} are not on one machine (or not in one space of "
            f"process numbers): use HierarchicalReducer, gloo or nccl"
        )
    return members


def check_engines(members: list[Member]) -> None:
    """Refuse a group of which a rank has no native engine.

    Raises:
        UnavailableError: One has none.
    """
    for member in members:
        if member.missing:
            raise UnavailableError(
                f"{member.label} has no native engine ({member.missing}): install hfai on Linux "
                f"with a C++ compiler, or use gloo or nccl"
            )


def connect(
    exchange: Exchange, rank: int, members: list[Member], settings: Settings, timeout: float
) -> tuple[_engine.Group, Settings, tuple[int, int, bool]]:
    """Make or open the memory of a group whose ranks are all on this node.

    Returns:
        The engine's group, the settings that count, and how the ranks' first meeting ended.

    Raises:
        ConnectionError: Rank 0 could not make the memory, or a rank not open it.
        DeadPeerError: A rank died meanwhile.
    """
    world = len(members)
    spare = min(topology.processors(), *(member.processors for member in members)) >= world
    patience = PATIENCE if spare else IMPATIENCE
    instructions = os.environ.get("HFREDUCE_INSTRUCTIONS", "")
    group: _engine.Group | None = None
    offer: dict[str, Any] = {}
    if rank == 0:
        token = secrets.token_bytes(16)
        try:
            group = _engine.Group.create(
                token, 0, world, *_layout(settings), instructions, **patience
            )
            offer = {
                "token": token.hex(),
                "descriptor": group.descriptor,
                "settings": settings.__dict__,
            }
        except (OSError, RuntimeError, ValueError) as error:
            offer = {"error": str(error)}
    watch = _watch(members)
    offer = json.loads(exchange(json.dumps(offer), watch)[0])
    if "error" in offer:
        raise ConnectionError(f"rank 0 could not make the group's memory: {offer['error']}")
    settings = Settings(**offer["settings"])
    failed, lost = "", False
    if group is None:
        try:
            group = _engine.Group.open(
                bytes.fromhex(offer["token"]),
                members[0].pid,
                offer["descriptor"],
                rank,
                world,
                *_layout(settings),
                instructions,
                **patience,
            )
        except OSError as error:
            lost = error.errno in _OF_THE_DEAD and 0 in dying(watch, 0)
            failed = (
                f"{error}: the ranks of a node must run as one user and see each other in /proc, "
                f"and the memory must fit each one's limits"
            )
        except (RuntimeError, ValueError) as error:
            failed = str(error)
    # Nobody waits in the memory for a rank that could not open it.
    said = [json.loads(text) for text in exchange(json.dumps([failed, lost]), watch)]
    # Rank 0 has said its part as soon as it had the others', and may be gone before they open.
    if any(gone for _, gone in said):
        raise DeadPeerError(f"{members[0].label} died before all had opened the group's memory", 0)
    for peer, (problem, _) in enumerate(said):
        if problem:
            raise ConnectionError(f"rank {peer} could not open the group's memory: {problem}")
    assert group is not None
    outcome = group.join([m.pid for m in members], [m.start for m in members], timeout)
    return group, settings, outcome


def _watch(members: list[Member]) -> Watch:
    def watch() -> list[int]:
        return [
            rank
            for rank, member in enumerate(members)
            if _engine.start_time(member.pid) != member.start
        ]

    return watch


def _layout(settings: Settings) -> tuple[int, int, int, int]:
    return settings.threads, settings.slots, settings.chunk_bytes, settings.direct_bytes
