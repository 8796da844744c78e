"""Who holds which tensors: ranks ask each other only where names, types or shapes have changed.

N/names/RANK     of save N: the digest of the rank's names, types and shapes, "same" where they
are those of its save before, or "failed"; only a rank where they are not the
same waits for others
N/list/RANK      the names themselves; written and read only where digests differ
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Any

from hfai.checkpoint.errors import CheckpointError, StateMismatchError
from hfai.checkpoint.format import digest
from hfai.checkpoint.parts import PRIVATE, Part
from hfai.checkpoint.peers import Peers
from hfai.checkpoint.plan import Planned, plan


class Meeting:
    """What one rank writes, found out by all of them.

    Args:
        peers: The ranks.

    Attributes:
        alike: Whether all ranks have the same names.
        known: All tensors but those of one rank alone: name -> type and shape.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._signature: Any = None
        self._planned: list[Planned] = []
        self.alike = True
        self.known: dict[str, list[Any]] = {}

    def forget(self) -> None:
        """Let all ranks tell each other all names again, with the next save."""
        self._signature = None

    def plan(self, number: int, parts: list[Part], primary: Collection[str]) -> list[Planned]:
        """Return what this rank writes; only where names or shapes have changed ask the others.

        Args:
            number: Of the save.
            parts: What this rank holds.
            primary: Names of plain tensors of which the first rank's values count.

        Raises:
            StateMismatchError: Ranks hold different tensors by one name, or some have changed.
            CheckpointError: Another rank has failed, or does not come.
        """
        signature = [part._replace(local=None) for part in parts]  # type: ignore[arg-type]
        same = signature == self._signature
        shared = [_description(p) for p in parts if not p.name.startswith(PRIVATE)]
        text = "" if same else json.dumps(shared)
        if self._peers.world > 1:
            said = f"{number}/names/{self._peers.rank}"
            self._peers.set(said, b"same" if same else digest(text.encode()).encode())
        if same:
            return self._planned
        holders = self._meet(number, text, parts)
        if self.alike:
            self.known = {name: [dtype, shape] for name, dtype, shape, _ in shared}
        self._planned = plan(parts, holders, primary)
        self._signature = signature
        return self._planned

    def _meet(self, number: int, text: str, parts: list[Part]) -> Any:
        """Learn which ranks hold which plain tensors."""
        world, rank = self._peers.world, self._peers.rank
        if world == 1:
            return lambda name: (1, 0, "")
        keys = [f"{number}/names/{peer}" for peer in range(world)]
        found = self._peers.wait(keys, f"save {number}")
        for peer, text_of in enumerate(found):
            if text_of == b"failed":
                self._peers.wait([f"{number}/done/{peer}"], "fail", raise_error)
        if b"same" in found:
            raise StateMismatchError(
                f"names or shapes changed on rank {rank} since the save before, and not on rank "
                f"{found.index(b'same')}: change them on all ranks between the same two saves"
            )
        self.alike = all(one == found[0] for one in found)
        if self.alike:
            return lambda name: (1, 0, "") if name.startswith(PRIVATE) else (world, rank, "all")
        self._peers.set(f"{number}/list/{rank}", text.encode())
        lists = self._peers.wait([f"{number}/list/{peer}" for peer in range(world)], "the save")
        rows = [json.loads(one) for one in lists]
        self.known = {name: [dtype, shape] for each in rows for name, dtype, shape, _ in each}
        return _holders(rank, rows)


def raise_error(key: str, text: bytes) -> None:
    """Raise what a rank has written in place of its report."""
    found = json.loads(text)
    if "error" in found:
        raise CheckpointError(found["error"])


def _description(part: Part) -> list[Any]:
    return [part.name, part.dtype, part.shape, part.replicas is None]


def _holders(rank: int, lists: Sequence[Sequence[Any]]) -> Any:
    """Return, for each plain tensor, how many ranks hold it, this one's place, and who they are."""
    known: dict[str, tuple[list[int], Any]] = {}
    for peer, rows in enumerate(lists):
        for name, dtype, shape, plain in rows:
            ranks, first = known.setdefault(name, ([], (dtype, shape, plain)))
            if first != (dtype, shape, plain):
                raise StateMismatchError(
                    f"{name} is {first[0]} of {tuple(first[1])} on rank {ranks[0]}, and {dtype} of "
                    f"{tuple(shape)} on rank {peer}: give different tensors different names"
                )
            ranks.append(peer)

    def holders(name: str) -> tuple[int, int, str]:
        if name.startswith(PRIVATE):
            return 1, 0, ""
        ranks = known[name][0]
        return len(ranks), ranks.index(rank), str(ranks)

    return holders
