"""Reading tensors: straight into their memory where it can be, and every chunk checked.

A wanted box is cut by the stored slices. What lies back to back both in the file and in the wanted
tensor is read to its place; the rest goes through a buffer, a band of rows at a time. A chunk that
is wanted only in part is read whole, because its hash is of all of it.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.errors import DamagedCheckpointError, is_damage
from hfai.checkpoint.format import DTYPES, Index, Slice, digest, hash_of
from hfai.checkpoint.parallel import in_threads
from hfai.checkpoint.parts import box, bytes_of, intersect, is_readable, is_run, linear

_BAND = 16 << 20  # bytes of a buffer, more or less
_BATCH = 1 << 20  # bytes of small tensors that are read by one call


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
    """Bytes of a slice that are read to their place."""

    source: Index
    slice: Slice
    start: int  # the first byte in the slice
    view: memoryview


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
    tasks = _tasks(files, _match(files, list(wanted), first))

    def work(task: list[_Run] | _Band) -> None:
        if isinstance(task, _Band):
            _read_band(files, task)
            progress(task.out.numel() * task.out.element_size())
        else:
            _read_runs(files, task)
            progress(sum(len(run.view) for run in task))

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
) -> Iterator[list[_Run] | _Band]:
    """Yield pieces of work; small runs that follow each other in a file are one."""
    batch: list[_Run] = []
    size = 0
    for index, piece, item, offsets, sizes in matches:
        there = tuple(a - b for a, b in zip(offsets, piece.offsets, strict=True))
        here = tuple(a - b for a, b in zip(offsets, item.offsets, strict=True))
        out = box(item.out, here, sizes)
        shape = tuple(item.out.shape)
        direct = is_readable(item.out) and is_run(sizes, shape) and is_run(sizes, piece.sizes)
        width = DTYPES[piece.dtype][1]
        if not direct:
            yield from _bands(index, piece, there, out)
            continue
        whole = bytes_of(item.out)
        begin = linear(here, shape) * width
        start = linear(there, piece.sizes) * width
        length = math.prod(sizes) * width
        if length < _BATCH:
            if batch and (batch[-1].source is not index or size + length > _BATCH):
                yield batch
                batch, size = [], 0
            batch.append(_Run(index, piece, start, whole[begin : begin + length]))
            size += length
            continue
        at = start
        while at < start + length:  # whole chunks, and what is left at both ends
            end = min((at // index.chunk + 1) * index.chunk, start + length)
            yield [_Run(index, piece, at, whole[begin + at - start : begin + end - start])]
            at = end
    if batch:
        yield batch


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
    """Read runs of one file, those that follow each other by one call."""
    file = files.file(runs[0].source)
    exact = [run for run in runs if not files.verify or _is_whole(run)]
    at = 0
    while at < len(exact):
        end = at + 1
        while end < len(exact) and _place(exact[end - 1]) + len(exact[end - 1].view) == _place(
            exact[end]
        ):
            end += 1
        group = exact[at:end]
        _fill(files, file, group[0], _place(group[0]), [run.view for run in group])
        at = end
    for run in exact:
        _check(files, run.source, run.slice, run.start, run.view)
    for run in runs:
        if files.verify and not _is_whole(run):
            found = _read_chunks(files, run.source, run.slice, run.start, len(run.view))
            run.view[:] = found


def _place(run: _Run) -> int:
    return run.slice.begin + run.start


def _is_whole(run: _Run) -> bool:
    """Whether a run is made of whole chunks."""
    end = run.start + len(run.view)
    at_end = end % run.source.chunk == 0 or end == run.slice.length
    return run.start % run.source.chunk == 0 and at_end


def _read_chunks(
    files: CheckpointFiles, index: Index, piece: Slice, start: int, length: int
) -> memoryview:
    """Return bytes of a slice, read with the whole chunks that they lie in."""
    first, end = start, start + length
    if files.verify:
        first = start // index.chunk * index.chunk
        end = min(piece.length, -(-end // index.chunk) * index.chunk)
    buffer = _scratch(end - first)
    view = bytes_of(buffer)
    run = _Run(index, piece, first, view)
    _fill(files, files.file(index), run, piece.begin + first, [view])
    _check(files, index, piece, first, view)
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


def _fill(
    files: CheckpointFiles, file: object, run: _Run, offset: int, views: list[memoryview]
) -> None:
    path = files.path_of(run.source.file)
    try:
        file.read_into(offset, views)  # type: ignore[attr-defined]
    except EOFError:
        raise DamagedCheckpointError(
            f"{path} was cut short: it ends within {run.slice.name}",
            path=path,
            tensor=run.slice.name,
            offset=offset,
        ) from None
    except OSError as error:
        if not is_damage(error):
            raise
        raise DamagedCheckpointError(
            f"{path} cannot be read at byte {offset}, in {run.slice.name}: {error}",
            path=path,
            tensor=run.slice.name,
            offset=offset,
        ) from error


def _check(
    files: CheckpointFiles, index: Index, piece: Slice, start: int, view: memoryview
) -> None:
    """Compare the hashes of whole chunks."""
    if not files.verify:
        return
    for at in range(0, len(view), index.chunk):
        chunk = (start + at) // index.chunk
        found, expected = digest(view[at : at + index.chunk]), hash_of(piece, chunk)
        if found != expected:
            begin = piece.begin + start + at
            end = begin + len(view[at : at + index.chunk])
            path = files.path_of(index.file)
            raise DamagedCheckpointError(
                f"{path} is damaged in {piece.name}, bytes {begin} to {end}: expected the hash "
                f"{expected}, found {found}",
                path=path,
                tensor=piece.name,
                offset=begin,
            )


_buffers = threading.local()


def _scratch(length: int) -> Tensor:
    """Return memory that the thread uses again; pinned memory is not worth it for one copy."""
    found: Tensor | None = getattr(_buffers, "memory", None)
    if found is None or found.numel() < length:
        found = torch.empty(length, dtype=torch.uint8)
        if length <= 2 * _BAND:
            _buffers.memory = found
    return found[:length]
