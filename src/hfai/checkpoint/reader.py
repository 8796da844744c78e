"""Reading tensors: straight into their memory where it can be, and every chunk checked.

A wanted box is cut by the stored slices. What lies back to back both in the file and in the wanted
tensor is read to its place; the rest goes through a buffer, a band of rows at a time. A chunk that
is wanted only in part is read whole, because its hash is of all of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, NoReturn

import torch
from torch import Tensor

from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.errors import DamagedCheckpointError, is_damage
from hfai.checkpoint.format import DTYPES, Index, Slice, hash_of, hashes_of
from hfai.checkpoint.parallel import in_threads
from hfai.checkpoint.parts import (
    box,
    bytes_of,
    flat_bytes,
    intersect,
    is_readable,
    is_run,
    linear,
)
from hfai.checkpoint.storage import Failure, Run

_BAND = 16 << 20  # bytes of a buffer, more or less
_LEAST = 4 << 20  # bytes of one piece of work


class Wanted(NamedTuple):
    """A box of a tensor, and where its values go.

    Attributes:
        name: Of the tensor in the checkpoint.
        offsets: Where the box begins.
        out: Of the box's shape and the stored type; any device, any strides.
    """

    name: str
    offsets: tuple[int, ...]
    out: Tensor


class _Run(NamedTuple):
    """Bytes of a slice that are read to their place.

    Attributes:
        source: Whose file they are in.
        slice: Of the tensor.
        start: The first of them, in the slice.
        out: Their place: memory, or a row of bytes on a device.
    """

    source: Index
    slice: Slice
    start: int
    out: memoryview | Tensor

    @property
    def length(self) -> int:
        return len(self.out)


class _Band(NamedTuple):
    """A part of a slice that is read to a buffer and copied from there."""

    source: Index
    slice: Slice
    offsets: tuple[int, ...]  # of what is copied, in the slice
    out: Tensor


class MissingTensorError(KeyError):
    """A checkpoint has no tensor of that name, or not all of it."""

    def __str__(self) -> str:
        return str(self.args[0])


def read(
    files: CheckpointFiles,
    wanted: Iterable[Wanted],
    threads: int,
    first: int = 0,
    progress: Callable[[int], object] = lambda count: None,
) -> None:
    """Fill tensors from a checkpoint.

    Args:
        files: The checkpoint.
        wanted: What is read.
        threads: That read and hash.
        first: Whose index is looked at first; others are read only if it does not have everything.
        progress: Called with numbers of bytes.

    Raises:
        DamagedCheckpointError: Bytes are not those that were written. Tensors read before are
            filled, others not.
        MissingTensorError: A tensor is not there, or not all of it.
        OSError: A file cannot be read.
    """
    items = list(wanted)
    # Enough pieces of work that threads end together.
    total = sum(item.out.nbytes for item in items)
    most = min(max(total // (4 * threads), _LEAST), files.location.at_once)
    tasks = _tasks(files, _match(files, items, first), most)

    def work(task: list[_Run] | _Band) -> None:
        if isinstance(task, _Band):
            _read_band(files, task)
            progress(task.out.numel() * task.out.element_size())
        else:
            _read_runs(files, task)
            progress(sum(run.length for run in task))

    in_threads(work, tasks, threads)


def check(files: CheckpointFiles, wanted: Iterable[Wanted], threads: int, first: int = 0) -> None:
    """Read and compare what `read` would, and fill nothing.

    Args and errors are those of `read`.
    """

    def work(task: tuple[Index, Slice, int, int]) -> None:
        _read_chunks(files, *task)

    in_threads(work, _touched(_match(files, list(wanted), first)), threads)


def _touched(
    matches: Iterator[tuple[Index, Slice, Wanted, tuple[int, ...], tuple[int, ...]]],
) -> Iterator[tuple[Index, Slice, int, int]]:
    """Yield the bytes of slices that are wanted, chunk by chunk: where they begin, how many."""
    for index, piece, _, offsets, sizes in matches:
        there = tuple(a - b for a, b in zip(offsets, piece.offsets, strict=True))
        last = tuple(o + s - 1 for o, s in zip(there, sizes, strict=True))
        width = DTYPES[piece.dtype][1]
        begin = linear(there, piece.sizes) * width
        end = (linear(last, piece.sizes) + 1) * width
        for at in range(begin // index.chunk * index.chunk, end, index.chunk):
            yield index, piece, at, min(index.chunk, piece.length - at)


def _match(
    files: CheckpointFiles, wanted: Sequence[Wanted], first: int
) -> Iterator[tuple[Index, Slice, Wanted, tuple[int, ...], tuple[int, ...]]]:
    """Yield each stored slice with what is wanted of it: offsets and sizes in the whole tensor."""
    open_items: dict[str, list[tuple[Wanted, list[int]]]] = {}
    count = 0
    for item in wanted:
        missing = [max(1, item.out.numel())]  # a tensor without items must be there too
        open_items.setdefault(item.name, []).append((item, missing))
        count += 1
    for index in files.indexes(first):
        if not count:
            return
        for piece in index.slices:
            for item, missing in open_items.get(piece.name, ()):
                if missing[0] == 0:
                    continue
                sizes = tuple(item.out.shape)
                if item.out.numel() == 0:
                    missing[0] = 0
                    count -= 1
                    continue
                shared = intersect(item.offsets, sizes, piece.offsets, piece.sizes)
                if shared is None:
                    continue
                missing[0] -= math.prod(shared[1])
                count -= missing[0] == 0
                yield index, piece, item, *shared
    for items in open_items.values():
        for item, missing in items:
            if missing[0]:
                raise MissingTensorError(
                    f"{files.path} does not have all of {item.name}: {missing[0]} of "
                    f"{max(1, item.out.numel())} items are in none of its files"
                )


def _tasks(
    files: CheckpointFiles,
    matches: Iterator[tuple[Index, Slice, Wanted, tuple[int, ...], tuple[int, ...]]],
    most: int,
) -> Iterator[list[_Run] | _Band]:
    """Yield pieces of work: runs of one file that follow each other, or a band.

    Args:
        files: The checkpoint.
        matches: What is wanted of which slice.
        most: Bytes of a piece of work, more or less.
    """
    group: list[_Run] = []
    size = 0
    for index, piece, item, offsets, sizes in matches:
        there = tuple(a - b for a, b in zip(offsets, piece.offsets, strict=True))
        here = tuple(a - b for a, b in zip(offsets, item.offsets, strict=True))
        shape = tuple(item.out.shape)
        whole = _place_of(item.out) if is_run(sizes, shape) and is_run(sizes, piece.sizes) else None
        if whole is None:
            yield from _bands(index, piece, there, box(item.out, here, sizes))
            continue
        width = DTYPES[piece.dtype][1]
        start = linear(there, piece.sizes) * width
        shift = linear(here, shape) * width - start
        length = math.prod(sizes) * width
        longest = most if isinstance(whole, memoryview) else min(most, _BAND)
        for at, end in _cuts(start, start + length, piece.length, index.chunk, longest):
            if group and (group[-1].source is not index or size + end - at > most):
                yield group
                group, size = [], 0
            group.append(_Run(index, piece, at, whole[at + shift : end + shift]))
            size += end - at
    if group:
        yield group


def _place_of(out: Tensor) -> memoryview | Tensor | None:
    """Return a tensor's memory as bytes; None where its values do not lie there row by row."""
    if is_readable(out):
        return bytes_of(out)
    if out.device.type == "cpu" or not out.is_contiguous() or out.is_conj() or out.is_neg():
        return None
    return flat_bytes(out.detach())


def _cuts(start: int, end: int, length: int, chunk: int, most: int) -> Iterator[tuple[int, int]]:
    """Cut bytes of a slice of `length` into runs of whole chunks, and what is left at both ends."""
    at = start
    while at < end:
        last = end if end == length else end // chunk * chunk  # of the whole chunks
        if at % chunk or at >= last:
            stop = min(end, (at // chunk + 1) * chunk)
        else:
            stop = min(last, at + max(most // chunk, 1) * chunk)
        yield at, stop
        at = stop


def _bands(index: Index, piece: Slice, offsets: tuple[int, ...], out: Tensor) -> Iterator[_Band]:
    """Cut what is copied into bands of rows."""
    if out.ndim == 0:
        yield _Band(index, piece, offsets, out)
        return
    row = max(1, piece.length // max(1, piece.sizes[0]))
    rows = max(1, _BAND // row)
    for first in range(0, out.shape[0], rows):
        part = out[first : first + rows]
        yield _Band(index, piece, (offsets[0] + first, *offsets[1:]), part)


def _read_runs(files: CheckpointFiles, runs: list[_Run]) -> None:
    """Read runs of one file."""
    direct = [
        run
        for run in runs
        if isinstance(run.out, memoryview) and (not files.verify or _is_whole(run))
    ]
    _fill(files, [(run.source, run.slice, run.start, run.out) for run in direct])  # type: ignore[misc]
    if len(direct) == len(runs):
        return
    done = set(map(id, direct))
    for run in runs:
        if id(run) in done:
            continue
        if isinstance(run.out, memoryview):
            found = _read_chunks(files, run.source, run.slice, run.start, run.length)
            run.out[:] = found
        else:
            found = _read_chunks(files, run.source, run.slice, run.start, run.length, pinned=True)
            run.out.copy_(torch.frombuffer(found, dtype=torch.uint8))


def _is_whole(run: _Run) -> bool:
    """Whether a run is made of whole chunks."""
    end = run.start + run.length
    at_end = end % run.source.chunk == 0 or end == run.slice.length
    return run.start % run.source.chunk == 0 and at_end


def _read_chunks(
    files: CheckpointFiles,
    index: Index,
    piece: Slice,
    start: int,
    length: int,
    pinned: bool = False,
) -> memoryview:
    """Return bytes of a slice, read with the whole chunks that they lie in."""
    first, end = start, start + length
    if files.verify:
        first = start // index.chunk * index.chunk
        end = min(piece.length, -(-end // index.chunk) * index.chunk)
    view = bytes_of(_scratch(end - first, pinned))
    _fill(files, [(index, piece, first, view)])
    return view[start - first : start - first + length]


def _read_band(files: CheckpointFiles, band: _Band) -> None:
    piece, width = band.slice, DTYPES[band.slice.dtype][1]
    sizes = tuple(band.out.shape)
    last = tuple(o + s - 1 for o, s in zip(band.offsets, sizes, strict=True))
    # All rows of the slice that the band touches.
    row = math.prod(piece.sizes[1:])
    first = band.offsets[0] * row if sizes else 0
    end = (last[0] + 1) * row if sizes else 1
    view = _read_chunks(files, band.source, piece, first * width, (end - first) * width)
    flat = torch.frombuffer(view, dtype=torch.uint8).view(getattr(torch, piece.dtype))
    if not sizes:
        band.out.copy_(flat[0])
        return
    rows = flat.view(sizes[0], *piece.sizes[1:])
    band.out.copy_(box(rows, (0, *band.offsets[1:]), sizes))


def _fill(files: CheckpointFiles, wanted: Sequence[tuple[Index, Slice, int, memoryview]]) -> None:
    """Read bytes of one file's slices; those of whole chunks, if hashes are compared."""
    if not wanted:
        return
    runs = []
    for index, piece, start, view in wanted:
        hashes = ""
        if files.verify:
            count = -(-len(view) // index.chunk)
            hashes = hashes_of(piece.hashes, start // index.chunk, count)
        runs.append(Run(piece.begin + start, view, hashes))
    index = wanted[0][0]
    failure = files.file(index).read_runs(runs, index.chunk)
    if failure is not None:
        _, piece, start, view = wanted[failure.run]
        _raise_failure(files, index, piece, start, view, failure)


def _raise_failure(
    files: CheckpointFiles,
    index: Index,
    piece: Slice,
    start: int,
    view: memoryview,
    failure: Failure,
) -> NoReturn:
    path, begin = files.path_of(index.file), piece.begin + start
    if failure.error is None:
        expected = hash_of(piece, start // index.chunk + failure.chunk)
        at = failure.chunk * index.chunk
        begin, end = begin + at, begin + min(at + index.chunk, len(view))
        what = (
            f"is damaged in {piece.name}, bytes {begin} to {end}: expected the hash {expected}, "
            f"found {failure.found}"
        )
    elif isinstance(failure.error, EOFError):
        what = f"was cut short: it ends within {piece.name}"
    elif is_damage(failure.error):
        what = f"cannot be read at byte {begin}, in {piece.name}: {failure.error}"
    else:
        raise failure.error
    raise DamagedCheckpointError(
        f"{path} {what}", path=path, tensor=piece.name, offset=begin
    ) from failure.error


_buffers = threading.local()


def _scratch(length: int, pinned: bool = False) -> Tensor:
    """Return memory that the thread uses again.

    Args:
        length: Its bytes.
        pinned: Page-locked, from which a GPU copies several times as fast. Making such memory takes
            milliseconds, which is only worth it for what is used again.
    """
    name = "pinned" if pinned else "memory"
    found: Tensor | None = getattr(_buffers, name, None)
    if found is None or found.numel() < length:
        keep = length <= 2 * _BAND
        pinned = pinned and keep and torch.cuda.is_available()
        size = max(length, _BAND) if pinned else length
        found = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        if keep:
            setattr(_buffers, name, found)
    return found[:length]
