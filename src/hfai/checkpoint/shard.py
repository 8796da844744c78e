"""Writing one rank's tensors: in segments of the file, each hashed and written by one thread.

A segment is a run of whole chunks, with the padding between them, that is written in one call. Its
bytes are taken from the tensors' own memory where they lie there as they are to be stored, and else
from a buffer of the pool that they are copied to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hfai.checkpoint.format import ALIGNMENT, CHUNK, Layout, Slice
from hfai.checkpoint.parts import Part, bytes_of, flat_bytes, is_readable
from hfai.checkpoint.plan import Planned

SEGMENT = 32 << 20  # bytes of a buffer; 32 MiB keep a GPU's copy engine busy between two calls


class Piece(NamedTuple):
    """One chunk of a slice in a segment.

    Attributes:
        slice: Number of the slice.
        chunk: Number of the chunk.
        start: Its first byte in the slice.
        length: Its bytes.
        at: Where it lies in the segment.
    """

    slice: int
    chunk: int
    start: int
    length: int
    at: int


class Segment(NamedTuple):
    """A run of the file, of `length` bytes from `begin` on."""

    begin: int
    length: int
    pieces: tuple[Piece, ...]


def segments(layout: Layout) -> Iterator[Segment]:
    """Cut a file, behind its header, into segments of whole chunks."""
    begin, pieces = len(layout.header), list[Piece]()
    end = begin
    for number, piece in enumerate(layout.slices):
        for chunk, start in enumerate(range(0, piece.length, CHUNK)):
            length = min(CHUNK, piece.length - start)
            first = piece.begin + start
            if pieces and first + length - begin > SEGMENT:
                yield Segment(begin, first - begin, tuple(pieces))
                begin, pieces = first, []
            pieces.append(Piece(number, chunk, start, length, first - begin))
            end = first + length
    if pieces or end < layout.size:
        yield Segment(begin, layout.size - begin, tuple(pieces))


def local_of(planned: Planned, parts: Sequence[Part]) -> Tensor:
    """Return the values of a planned slice, as a view of its tensor."""
    part = parts[planned.part]
    if planned.dim < 0:
        return part.local
    return part.local.narrow(planned.dim, planned.begin, planned.rows)


class Contents:
    """The values of a layout's slices.

    Args:
        layout: Where they go.
        locals: The values of each slice.
    """

    def __init__(self, layout: Layout, locals: Sequence[Tensor]) -> None:
        self._layout = layout
        self._locals = [local.resolve_conj().resolve_neg() for local in locals]
        self._views = [bytes_of(t) if is_readable(t) else None for t in self._locals]
        self._hashes = [[""] * -(-piece.length // CHUNK) for piece in layout.slices]

    def is_direct(self, segment: Segment) -> bool:
        """Whether a segment can be written from the tensors' own memory."""
        return all(self._views[piece.slice] is not None for piece in segment.pieces)

    def devices(self) -> set[torch.device]:
        """Return where the values are."""
        return {local.device for local in self._locals}

    def direct(self, segment: Segment) -> list[memoryview]:
        """Return a segment's chunks and the padding between them, from the tensors' own memory."""
        return self._parts(segment, None)

    def copied(self, segment: Segment, buffer: Tensor) -> list[memoryview]:
        """Return the same of a segment that `copy` has put into a buffer."""
        return self._parts(segment, bytes_of(buffer))

    def _parts(self, segment: Segment, buffer: memoryview | None) -> list[memoryview]:
        views, at = [], 0
        for piece in segment.pieces:
            if piece.at > at:
                views.append(_padding(at, piece.at, buffer))
            at = piece.at + piece.length
            if buffer is not None:
                views.append(buffer[piece.at : at])
            else:
                view = self._views[piece.slice]
                assert view is not None, "is_direct was not asked"
                views.append(view[piece.start : piece.start + piece.length])
        if at < segment.length:
            views.append(_padding(at, segment.length, buffer))
        return views

    def copy(self, segment: Segment, buffer: Tensor) -> None:
        """Copy a segment's bytes into a buffer, padding included.

        Copies from a GPU are enqueued on the current stream where the buffer is pinned.
        """
        at = 0
        for piece in segment.pieces:
            if piece.at > at:
                buffer[at : piece.at].zero_()
            at = piece.at + piece.length
            copy_range(self._locals[piece.slice], piece.start, piece.length, buffer[piece.at : at])
        if at < segment.length:
            buffer[at : segment.length].zero_()

    def note(self, segment: Segment, hashes: Sequence[str]) -> None:
        """Keep the hashes of a segment's parts, as `direct` and `copied` give them."""
        found, at = iter(hashes), 0
        for piece in segment.pieces:
            if piece.at > at:
                next(found)
            self._hashes[piece.slice][piece.chunk] = next(found)
            at = piece.at + piece.length

    def slices(self) -> tuple[Slice, ...]:
        """Return the slices with their hashes, once those of all segments were noted."""
        return tuple(
            piece._replace(hashes="".join(hashes))
            for piece, hashes in zip(self._layout.slices, self._hashes, strict=True)
        )


def copy_range(local: Tensor, start: int, length: int, out: Tensor) -> None:
    """Copy bytes of a tensor's row-major values; nothing larger than the bytes is made on the way.

    Args:
        local: Any strides, any device.
        start: The first byte.
        length: How many.
        out: As many bytes, on the CPU.
    """
    item = local.element_size()
    first, count = start // item, length // item
    if not local.is_contiguous() and local.ndim > 1:
        width = local.numel() // local.shape[0]
        row, last = first // width, -(-(first + count) // width)
        if last - row == 1:
            copy_range(local[row], start - row * width * item, length, out)
            return
        if count <= width:  # two rows, of which less than one is wanted
            border = (row + 1) * width * item - start
            copy_range(local, start, border, out[:border])
            copy_range(local, start + border, length - border, out[border:])
            return
        local, first = local[row:last], first - row * width
    flat = local.reshape(-1)[first : first + count]
    out.copy_(flat_bytes(flat.contiguous()), non_blocking=True)


def _padding(begin: int, end: int, buffer: memoryview | None) -> memoryview:
    return _ZEROS[: end - begin] if buffer is None else buffer[begin:end]


_ZEROS = memoryview(bytes(ALIGNMENT))
