"""Who holds which tensors: ranks ask each other only where names, types or shapes have changed.

N/names/RANK     of save N: the digest of the rank's names, types and shapes, behind "same "
where they are those of its save before; or "failed"; only a rank where they are not the
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

_SAME = b"same "


class Meeting:
    """What one rank writes, found out by all of them.

    Args:
        peers: The ranks.

    Attributes:
        alike: Whether all ranks have the same names.
        changed: Whether what ranks write is not what they wrote in the save before.
        known: All tensors but those of one rank alone: name -> type and shape.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._signature: Any = None
        self._digest = b""  # of what the last plan was made from
        self._planned: list[Planned] = []
        self.alike = True
        self.changed = True
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
        common = [part for part in parts if not part.name.startswith(PRIVATE)]
        shared = [_description(part) for part in common]
        text = "" if same else json.dumps(shared)
        if self._peers.world > 1:
            said = f"{number}/names/{self._peers.rank}"
            if not same:
                self._digest = digest(text.encode()).encode()
            self._peers.set(said, _SAME + self._digest if same else self._digest)
        self.changed = not same
        if same:
            return self._planned
        holders = self._meet(number, text, common)
        if self.alike:
            self.known = {name: [dtype, shape] for name, dtype, shape, _ in shared}
        self._planned = plan(parts, holders, primary)
        self._signature = signature
        return self._planned

    def _meet(self, number: int, text: str, parts: list[Part]) -> Any:
        """Learn which ranks hold the same boxes."""
        world, rank = self._peers.world, self._peers.rank
        everyone = (world, rank, "all")
        if world == 1:
            return lambda part: part.replicas or (1, 0, "")
        keys = [f"{number}/names/{peer}" for peer in range(world)]
        found = self._peers.wait(keys, f"save {number}")
        for peer, text_of in enumerate(found):
            if text_of == b"failed":
                self._peers.wait([f"{number}/done/{peer}"], "fail", raise_error)
        digests = [text_of.removeprefix(_SAME) for text_of in found]
        self.alike = all(one == digests[0] for one in digests)
        same = [peer for peer, text_of in enumerate(found) if text_of.startswith(_SAME)]
        if same and not self.alike:  # alike, this rank alone was in a save that failed
            raise StateMismatchError(
                f"names or shapes changed on rank {rank} since the save before, and not on rank "
                f"{same[0]}: change them on all ranks between the same two saves"
            )
        if self.alike:
            return lambda part: _alone(part) or part.replicas or everyone
        boxes = [[*_description(part), part.offsets, part.sizes] for part in parts]
        self._peers.set(f"{number}/list/{rank}", json.dumps(boxes).encode())
        lists = self._peers.wait([f"{number}/list/{peer}" for peer in range(world)], "the save")
        rows = [json.loads(one) for one in lists]
        # Names alone: replicas of a model may each have a mesh of their own.
        named = [[(name, dtype, shape) for name, dtype, shape, *_ in each] for each in rows]
        self.alike = all(one == named[0] for one in named)
        self.known = {name: [dtype, shape] for each in named for name, dtype, shape in each}
        return _holders(rank, rows)


def raise_error(key: str, text: bytes) -> None:
    """Raise what a rank has written in place of its report."""
    found = json.loads(text)
    if "error" in found:
        raise CheckpointError(found["error"])


def _description(part: Part) -> list[Any]:
    return [part.name, part.dtype, part.shape, part.mesh]


def _words(dtype: str, shape: Sequence[int], plain: bool) -> str:
    return f"{dtype} of {tuple(shape)}{'' if plain else ', a DTensor,'}"


def _alone(part: Part) -> tuple[int, int, str] | None:
    return (1, 0, "") if part.name.startswith(PRIVATE) else None


def _holders(rank: int, lists: Sequence[Sequence[Any]]) -> Any:
    """Return, for each box, how many ranks hold it, this one's place, and who they are."""
    known: dict[str, tuple[int, Any]] = {}
    boxes: dict[Any, list[int]] = {}
    for peer, rows in enumerate(lists):
        for name, dtype, shape, mesh, offsets, sizes in rows:
            found = (dtype, shape, mesh == "")
            first_peer, first = known.setdefault(name, (peer, found))
            if first != found:
                raise StateMismatchError(
                    f"{name} is {_words(*first)} on rank {first_peer}, and {_words(*found)} on "
                    f"rank {peer}: give different tensors different names"
                )
            boxes.setdefault((name, tuple(offsets), tuple(sizes)), []).append(peer)

    def holders(part: Part) -> tuple[int, int, str]:
        ranks = boxes.get((part.name, part.offsets, part.sizes), [rank])
        return _alone(part) or (len(ranks), ranks.index(rank), str(ranks))

    return holders
