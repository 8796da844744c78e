"""Which tensors of two checkpoints differ, bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from hfai.checkpoint.api import default_threads
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.format import Index, Slice
from hfai.checkpoint.loading import TensorInfo, tensor_infos
from hfai.checkpoint.parts import bytes_of
from hfai.checkpoint.reader import Wanted, read
from hfai.checkpoint.storage import PathLike

Places = Sequence["tuple[Index, Slice]"]


class Difference(NamedTuple):
    """How two checkpoints differ.

    Attributes:
        same: How many tensors are equal.
        changed: Names of those of another type, shape or value.
        added: Names that only the second has.
        removed: Names that only the first has.
    """

    same: int
    changed: list[str]
    added: list[str]
    removed: list[str]


def compare(
    first: PathLike, second: PathLike, progress: Callable[[int], object] = lambda count: None
) -> Difference:
    """Compare two checkpoints.

    Hashes decide where both store a tensor in the same slices; otherwise both are read.

    Raises:
        CheckpointError: One cannot be read.
    """
    with CheckpointFiles(first) as one, CheckpointFiles(second) as other:
        ours, theirs = tensor_infos(one), tensor_infos(other)
        places, other_places = one.slices(), other.slices()
        aliases, other_aliases = one.aliases(), other.aliases()
        changed = []
        both = sorted(ours.keys() & theirs.keys())
        for name in both:
            target, other_target = aliases.get(name, name), other_aliases.get(name, name)
            equal = ours[name] == theirs[name]
            if equal:
                known = _by_hashes(places[target], other_places[other_target])
                if known is None:
                    mine = _bytes(one, target, ours[name], progress)
                    known = mine == _bytes(other, other_target, theirs[name], progress)
                equal = known
            if not equal:
                changed.append(name)
        return Difference(
            len(both) - len(changed),
            changed,
            sorted(theirs.keys() - ours.keys()),
            sorted(ours.keys() - theirs.keys()),
        )


def _by_hashes(places: Places, others: Places) -> bool | None:
    """Say whether a tensor is equal; None where the slices are not the same."""

    def boxes(of: Places) -> dict[tuple[tuple[int, ...], tuple[int, ...], int], str]:
        return {(piece.offsets, piece.sizes, index.chunk): piece.hashes for index, piece in of}

    ours, theirs = boxes(places), boxes(others)
    return ours == theirs if ours.keys() == theirs.keys() else None


def _bytes(
    files: CheckpointFiles, name: str, info: TensorInfo, progress: Callable[[int], object]
) -> memoryview:
    tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
    wanted = Wanted(name, (0,) * tensor.ndim, tensor)
    read(files, [wanted], default_threads(), progress=progress)
    return bytes_of(tensor)
