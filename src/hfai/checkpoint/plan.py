"""Who writes what: decided by each rank for itself, from names, shapes and meshes alone.

Ranks that hold the same boxes lay them end to end, cut that line into as many equal lengths as they
are, and each writes its length: no rank writes or holds more than its share, and no rank needs to
tell another. A cut falls between rows, and small tensors are not cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from hfai.checkpoint.format import DTYPES, Slice
from hfai.checkpoint.parts import Part

_LEAST_CUT = 1 << 20  # bytes; smaller tensors are written by one rank


class Planned(NamedTuple):
    """A slice that this rank writes.

    Attributes:
        slice: Without its place in the file.
        part: Whose it is; its number in the order of the parts.
        dim: Which dimension of the part it is cut along.
        begin: Its first row.
        rows: How many.
    """

    slice: Slice
    part: int
    dim: int
    begin: int
    rows: int


# Says which of how many ranks this is among those that hold a part's box; the text names them.
Holders = Callable[[Part], "tuple[int, int, str]"]


def plan(parts: Sequence[Part], holders: Holders, primary: Collection[str]) -> list[Planned]:
    """Return what this rank writes.

    Args:
        parts: What it holds, in the same order on all ranks that hold the same.
        holders: Who holds the same.
        primary: Names of plain tensors whose first holder's values count, such as buffers, which
            differ between data-parallel ranks: that one writes all of them.
    """
    groups: dict[tuple[int, int, str], list[int]] = defaultdict(list)
    found: list[Planned] = []
    for number, part in enumerate(parts):
        count, replica, key = holders(part)
        if part.replicas is None and part.name in primary:
            if replica > 0:
                continue
            count = 1
        if math.prod(part.sizes) == 0:
            # The tensor's name must not be lost: whoever is at its beginning writes no bytes.
            if replica == 0 and math.prod(part.shape) == 0 and not any(part.offsets):
                found.append(_cut(part, number, 0, 0, None))
            continue
        groups[count, replica, key].append(number)
    for (count, replica, _), numbers in groups.items():
        # Others of these ranks may have named them in another order.
        numbers.sort(key=lambda number: (parts[number].name, parts[number].offsets))
        lines = [_line(parts[number]) for number in numbers]
        shares = my_share([(rows, width) for _, rows, width in lines], count, replica)
        for item, begin, rows in shares:
            number = numbers[item]
            dim, whole, _ = lines[item]
            cut = None if rows == whole else dim
            found.append(_cut(parts[number], number, begin, rows, cut))
    return found


def my_share(items: Sequence[tuple[int, int]], count: int, mine: int) -> list[tuple[int, int, int]]:
    """Cut items, laid end to end, into `count` nearly equal lengths; return one of them.

    Args:
        items: Rows, and bytes of a row.
        count: How many lengths.
        mine: Which of them.

    Returns:
        Of each item in it: its number, its first row, how many rows.
    """
    total = sum(rows * width for rows, width in items)
    first, last = total * mine // count, total * (mine + 1) // count
    found, at = [], 0
    for number, (rows, width) in enumerate(items):
        begin = _row(first - at, rows, width) if mine else 0
        end = _row(last - at, rows, width) if mine + 1 < count else rows
        if end > begin:
            found.append((number, begin, end - begin))
        at += rows * width
    return found


def _row(position: int, rows: int, width: int) -> int:
    """Return the border between rows that is nearest to a byte."""
    return min(rows, max(0, (2 * position + width) // (2 * width)))


def _line(part: Part) -> tuple[int, int, int]:
    """Return the dimension a part is cut along, its rows, and bytes of a row."""
    size = math.prod(part.sizes) * DTYPES[part.dtype][1]
    dim = next((at for at, extent in enumerate(part.sizes) if extent > 1), 0)
    if size < _LEAST_CUT or not part.sizes:
        return dim, 1, size
    rows = part.sizes[dim]
    return dim, rows, size // rows


def _cut(part: Part, number: int, begin: int, rows: int, dim: int | None) -> Planned:
    offsets, sizes = list(part.offsets), list(part.sizes)
    if dim is not None:
        offsets[dim] += begin
        sizes[dim] = rows
    length = math.prod(sizes) * DTYPES[part.dtype][1]
    piece = Slice(part.name, part.dtype, part.shape, tuple(offsets), tuple(sizes), 0, length)
    return Planned(piece, number, -1 if dim is None else dim, begin, rows)
