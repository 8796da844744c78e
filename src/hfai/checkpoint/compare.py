"""How two checkpoints differ, bit for bit.

Both are verified first, so that hashes stand for bytes that are there; then tensors are compared by
hashes where both lie in the same slices, and values as they are encoded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from hfai.checkpoint.api import default_threads
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.errors import DamagedCheckpointError
from hfai.checkpoint.format import Index, Slice
from hfai.checkpoint.loading import TensorInfo, encoded_values, tensor_infos
from hfai.checkpoint.parts import bytes_of
from hfai.checkpoint.reader import Wanted, read
from hfai.checkpoint.storage import PathLike
from hfai.checkpoint.verify import verify

Places = Sequence["tuple[Index, Slice]"]


class Difference(NamedTuple):
    """How two checkpoints differ.

    Attributes:
        same: How many tensors are equal.
        changed: Names of those of another type, shape or value.
        added: Names that only the second has.
        removed: Names that only the first has.
        values: Where what is no tensor differs: "step", "others/lr", "rank/0/rng".
    """

    same: int
    changed: list[str]
    added: list[str]
    removed: list[str]
    values: list[str]


def compare(
    first: PathLike, second: PathLike, progress: Callable[[int], object] = lambda count: None
) -> Difference:
    """Compare two checkpoints.

    Every byte of both is read and verified. Then hashes decide where both store a tensor in the
    same slices; otherwise both are read again.

    Raises:
        DamagedCheckpointError: One is damaged, or a file of it is missing.
        CheckpointError: One cannot be read.
    """
    with CheckpointFiles(first) as one, CheckpointFiles(second) as other:
        for files in (one, other):
            _need_whole(files, progress)
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
            list(_differing(_values(one), _values(other), "")),
        )


def _need_whole(files: CheckpointFiles, progress: Callable[[int], object]) -> None:
    damages = verify(files, default_threads(), progress)
    if damages:
        worst, more = damages[0], len(damages) - 1
        text = f"{worst.message} (and {more} more)" if more else worst.message
        raise DamagedCheckpointError(
            text, path=worst.path, tensor=worst.tensor, offset=worst.offset
        )


def _values(files: CheckpointFiles) -> dict[str, Any]:
    """Return all that is no tensor, encoded, by the names that tensors among it begin with."""
    values, _ = encoded_values(files, 0)
    own = {str(rank): encoded_values(files, rank)[1] for rank in range(files.commit.world)}
    commit = files.commit
    return {"step": commit.step, "epoch": commit.epoch, **values, "rank": own}


def _differing(one: Any, other: Any, name: str) -> Iterator[str]:
    """Yield the ways to encoded values that differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        if not any(key.startswith("$") for key in keys):
            for key in keys:
                way = f"{name}/{key}" if name else key
                if key in one and key in other:
                    yield from _differing(one[key], other[key], way)
                elif _has_values(one.get(key, other.get(key))):
                    yield way
            return
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (item, its) in enumerate(zip(one, other, strict=True)):
            yield from _differing(item, its, f"{name}/{number}")
        return
    if _in_order(one) != _in_order(other):
        yield name


def _has_values(encoded: Any) -> bool:
    """Whether there is anything in it but tensors, which are compared by themselves."""
    if isinstance(encoded, dict) and encoded:
        return "$tensor" not in encoded and any(map(_has_values, encoded.values()))
    return True


def _in_order(encoded: Any) -> str:
    """Return an encoded value as text in which members of sets and dicts have one order.

    As text, since 1, 1.0 and True are equal in Python.
    """
    if isinstance(encoded, list):
        return f"[{','.join(map(_in_order, encoded))}]"
    if not isinstance(encoded, dict):
        return json.dumps(encoded)
    found = []
    for key, value in sorted(encoded.items()):
        text = _in_order(value)
        if key in ("$set", "$frozenset", "$dict"):
            text = f"[{','.join(sorted(map(_in_order, value)))}]"
        found.append(f"{json.dumps(key)}:{text}")
    return f"{{{','.join(found)}}}"


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
