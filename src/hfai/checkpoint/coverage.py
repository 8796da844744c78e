"""Whether boxes make up a tensor: each item of it in one of them, and in no other.

A save asks before it commits: what lacks items, or has some twice, is no checkpoint. Ranks tell
rank 0 their boxes only where these are not those of the save before, which was asked about then.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hfai.checkpoint.calls import FAILED
from hfai.checkpoint.errors import CheckpointError

if TYPE_CHECKING:
    from hfai.checkpoint.format import Slice
    from hfai.checkpoint.peers import Peers

Box = tuple[Sequence[int], Sequence[int]]  # offsets and sizes


def fault(shape: Sequence[int], boxes: Sequence[Box]) -> str:
    """Return what is wrong with a tensor's boxes, in words; "" where they are it, exactly once."""
    filled = [one for one in boxes if math.prod(one[1])]
    missing = math.prod(shape) - sum(math.prod(sizes) for _, sizes in filled)
    if missing > 0:
        return f"lack {missing} of its {math.prod(shape)} items"
    if any(a + n > whole for one in filled for a, n, whole in zip(*one, shape, strict=True)):
        return "reach beyond it"
    return "overlap" if missing < 0 or _overlap(filled) else ""


def tell(peers: Peers, number: int, slices: Sequence[Slice]) -> None:
    """Tell rank 0 what this rank writes in a save."""
    rows = [[one.name, one.shape, one.offsets, one.sizes] for one in slices]
    text = zlib.compress(json.dumps(rows, separators=(",", ":")).encode(), 1)
    peers.set(f"{number}/slices/{peers.rank}", text)


def need_whole(peers: Peers, number: int, known: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a save that would not have every item of every tensor, and each once.

    Args:
        peers: The ranks, all of which have told.
        number: Of the save.
        known: Tensors that there must be: name -> type and shape.

    Raises:
        CheckpointError: It would not; names the tensor.
    """
    found: dict[str, tuple[Any, list[Box]]] = {
        name: (shape, []) for name, (_, shape) in known.items()
    }
    keys = [f"{number}/slices/{rank}" for rank in range(peers.world)]
    for text in peers.wait(keys, "finish the save"):
        for name, shape, offsets, sizes in json.loads(zlib.decompress(text)):
            found.setdefault(name, (shape, []))[1].append((offsets, sizes))
    for name, (shape, boxes) in found.items():
        wrong = fault(shape, boxes)
        if wrong:
            raise CheckpointError(
                f"{FAILED}all ranks: the parts of {name} that they hold {wrong}. Nothing was "
                "committed: all ranks of a DTensor's mesh must be in the save"
            )


def _overlap(boxes: Sequence[Box]) -> bool:
    """Whether any two boxes share items; few are compared, for they seldom begin together."""
    if len(boxes) < 2 or not boxes[0][0]:
        return len(boxes) > 1
    begins = [len({offsets[dim] for offsets, _ in boxes}) for dim in range(len(boxes[0][0]))]
    dim = begins.index(max(begins))
    reached: list[Box] = []
    for one in sorted(boxes, key=lambda box: box[0][dim]):
        reached = [box for box in reached if box[0][dim] + box[1][dim] > one[0][dim]]
        if any(_share(box, one) for box in reached):
            return True
        reached.append(one)
    return False


def _share(one: Box, other: Box) -> bool:
    spans = zip(*one, *other, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in spans)
