"""Looking at every byte of a checkpoint. It needs no torch."""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.errors import CheckpointError, DamagedCheckpointError, is_damage
from hfai.checkpoint.format import Index, Slice, digest, hash_of
from hfai.checkpoint.parallel import in_threads

_MOST_PAIRS = 512  # slices of a tensor up to which each is compared with each


class Damage(NamedTuple):
    """What is wrong at one place.

    Attributes:
        path: The file.
        tensor: Whose bytes; "" where they belong to none.
        offset: The first byte of the damaged chunk; -1 where that is not known.
        message: All of it in words.
    """

    path: str
    tensor: str
    offset: int
    message: str


def total_bytes(files: CheckpointFiles) -> int:
    """Return how many bytes of tensors there are to look at."""
    return sum(piece.length for index in files.indexes() for piece in index.slices)


def verify(
    files: CheckpointFiles, threads: int, progress: Callable[[int], object] = lambda count: None
) -> list[Damage]:
    """Compare every byte with its hash, and see that all tensors are complete.

    Args:
        files: The checkpoint, opened with `verify=True`.
        threads: That read and hash.
        progress: Called with numbers of bytes, from several threads.

    Returns:
        What is wrong, file by file; empty: nothing.
    """
    found: list[Damage] = []
    lock = threading.Lock()

    def note(error: DamagedCheckpointError | Damage) -> None:
        damage = error if isinstance(error, Damage) else _as_damage(error)
        with lock:
            found.append(damage)

    indexes = list(_readable_indexes(files, note))
    try:
        files.state()
    except DamagedCheckpointError as error:
        note(error)

    def check(task: tuple[Index, Slice | None, int, int]) -> None:
        index, piece, begin, length = task
        try:
            _check(files, index, piece, begin, length)
        except DamagedCheckpointError as error:
            note(error)
        progress(length if piece is not None else 0)

    openable = []
    for index in indexes:
        try:
            if index.file:
                files.file(index)
            openable.append(index)
        except DamagedCheckpointError as error:
            note(error)
    in_threads(check, (task for index in openable for task in _chunks(index)), threads)
    if len(indexes) == files.commit.world:
        for damage in _incomplete(files):
            note(damage)
    return sorted(found)


def unknown_files(files: CheckpointFiles) -> list[str]:
    """Return files in the directory that the commit record does not name; nothing reads them."""
    known = {*files.commit.files, "COMMIT"}
    return sorted(name for name in files.location.files() if name not in known)


def _readable_indexes(
    files: CheckpointFiles, note: Callable[[DamagedCheckpointError], None]
) -> Iterator[Index]:
    for rank in range(files.commit.world):
        try:
            yield files.index(rank)
        except DamagedCheckpointError as error:
            note(error)


def _chunks(index: Index) -> Iterator[tuple[Index, Slice | None, int, int]]:
    """Yield all that lies in a shard file behind its header: chunks, and the gaps between them."""
    at = index.header
    for piece in index.slices:
        if piece.begin > at:
            yield index, None, at, piece.begin - at
        for start in range(0, piece.length, index.chunk):
            length = min(index.chunk, piece.length - start)
            yield index, piece, piece.begin + start, length
        at = piece.begin + piece.length
    if index.size > at:
        yield index, None, at, index.size - at


def _check(
    files: CheckpointFiles, index: Index, piece: Slice | None, begin: int, length: int
) -> None:
    path = files.path_of(index.file)
    data = bytearray(length)
    try:
        files.file(index).read_into(begin, [memoryview(data)])
    except (EOFError, OSError) as error:
        if not is_damage(error):
            raise
        raise DamagedCheckpointError(
            f"{path} cannot be read at byte {begin}: {error}",
            path=path,
            tensor=piece.name if piece else "",
            offset=begin,
        ) from error
    if piece is None:
        if data.strip(b"\0"):
            raise DamagedCheckpointError(
                f"{path} is damaged between tensors, bytes {begin} to {begin + length}: they are "
                "not zero",
                path=path,
                offset=begin,
            )
        return
    found = digest(data)
    expected = hash_of(piece, (begin - piece.begin) // index.chunk)
    if found != expected:
        raise DamagedCheckpointError(
            f"{path} is damaged in {piece.name}, bytes {begin} to {begin + length}: expected the "
            f"hash {expected}, found {found}",
            path=path,
            tensor=piece.name,
            offset=begin,
        )


def _incomplete(files: CheckpointFiles) -> Iterator[Damage]:
    """Yield tensors whose slices do not make up all of them."""
    for name, places in files.slices().items():
        pieces = [piece for _, piece in places]
        missing = math.prod(pieces[0].shape) - sum(math.prod(piece.sizes) for piece in pieces)
        several = 1 < len(pieces) <= _MOST_PAIRS
        overlap = several and any(_overlap(a, b) for a, b in itertools.combinations(pieces, 2))
        alike = len({(piece.dtype, piece.shape) for piece in pieces}) == 1
        if missing or overlap or not alike:
            what = "overlap" if overlap or missing < 0 else f"lack {missing} of its items"
            what = what if alike else "have different types or shapes"
            yield Damage(files.path, name, -1, f"{files.path}: the slices of {name} {what}")


def _overlap(one: Slice, other: Slice) -> bool:
    spans = zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True)
    return all(max(a, b) < min(a + n, b + m) for a, n, b, m in spans)


def _as_damage(error: CheckpointError) -> Damage:
    path, tensor = getattr(error, "path", ""), getattr(error, "tensor", "")
    return Damage(path, tensor, getattr(error, "offset", -1), str(error))
