"""How a product is cut: into ranges of rows and of the summed dimension, and among blocks.

Pure arithmetic on sizes, so that it can be read and tested without a GPU.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

# Of pieces.cuh and product.cu.
ROWS, DEPTH, COLUMNS = 128, 32, 256
PIECE_PITCH = 3 * ROWS * DEPTH * 2 + 128
STAGES = 3
STAGE_PITCH = 25 * 1024
SHARED_BYTES = STAGES * (3 * STAGE_PITCH + 2 * 8)
THREADS = 3 * 128
SPLIT_THREADS, SUM_THREADS = 256, 256
SPLIT_SHARED_BYTES = ROWS * (DEPTH + 1) * 4

LEAST_SIZE = 64  # of rows and of columns
# Of the summed dimension: a sum of few values of very different sizes is little more than its
# largest product, which fp32 rounds once, to nearest.
LEAST_DEPTH = 512
WORTH = 1.0  # a product is ours where it is thought to take no more than this of torch's time

# Bytes that operands taken apart have at a time: at least so many, else this part of what the
# operands and the result themselves have. They are the call's only memory beside its result.
LEAST_WORKSPACE = 48 * 2**20
WORKSPACE_PART = 4

_CHUNKS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024)

# Seconds on an H200, of which plans are compared.
STAGE_TIME = 1.96e-6  # 32 of the summed dimension of one tile
TILE_TIME = 3e-6  # what a tile takes besides: filling the pipeline, storing
LAUNCH_TIME = 2.5e-6
BYTE_TIME = 1 / 3.5e12  # of what is read or written once
TORCHS_RATE = 47e12  # operations of fp32


@dataclass(frozen=True)
class Plan:
    """Of out [m, n] = a [m, k] b [k, n]."""

    row_chunk: int
    """Rows of a that are taken apart at a time."""
    depth_chunk: int
    """Of the summed dimension, at a time."""
    splits: int
    """Ranges of a chunk's summed dimension whose results lie apart at first."""
    time: float
    """About how long it all takes, in seconds."""


def tiles(size: int, unit: int) -> int:
    """Return how many tiles of `unit` hold `size`."""
    return -(-size // unit)


def piece_bytes(rows: int, depth: int, row_tile: int) -> int:
    """Return the bytes of a matrix [rows, depth] that was taken apart, its rows in whole tiles."""
    return tiles(rows, row_tile) * (row_tile // ROWS) * tiles(depth, DEPTH) * PIECE_PITCH


def workspace(m: int, k: int, n: int) -> int:
    """Return the bytes that operands taken apart may have at a time."""
    return max(LEAST_WORKSPACE, 4 * (m * k + k * n + m * n) // WORKSPACE_PART)


def choose(m: int, k: int, n: int, multiprocessors: int) -> Plan:
    """Return the plan that is thought the fastest of those that fit into `workspace`."""
    rows, depth, splits, time = _cut(tiles(m, ROWS), tiles(k, DEPTH), n, multiprocessors)
    return Plan(min(m, rows * ROWS), min(k, depth * DEPTH), splits, time)


@functools.lru_cache(maxsize=4096)  # by tiles: lengths vary from call to call
def _cut(
    row_tiles: int, depth_tiles: int, n: int, multiprocessors: int
) -> tuple[int, int, int, float]:
    """Return tiles of rows and of the summed dimension at a time, ranges, and seconds."""
    # Of the least sizes that have so many tiles; the others' is larger.
    room = workspace((row_tiles - 1) * ROWS + 1, (depth_tiles - 1) * DEPTH + 1, n)
    column_tiles = tiles(n, COLUMNS)
    # One tile of everything is the least that can be done, whether it fits or not.
    best = (1, 1, 1, math.inf)
    for chunks in _CHUNKS:
        depth = tiles(depth_tiles, chunks)
        right = column_tiles * (COLUMNS // ROWS) * depth * PIECE_PITCH
        most_rows = min(row_tiles, (room - right) // (depth * PIECE_PITCH))
        before = best
        for rows in _row_counts(most_rows, column_tiles, multiprocessors):
            for splits in _split_counts(rows * column_tiles, depth, multiprocessors):
                parts = 4 * splits * rows * ROWS * column_tiles * COLUMNS if splits > 1 else 0
                if parts + right + rows * depth * PIECE_PITCH > room:
                    break
                sizes = (row_tiles, depth_tiles, column_tiles)
                time = _time(sizes, rows, depth, splits, multiprocessors)
                if time < best[3]:
                    best = (rows, depth, splits, time)
        if depth == 1 or (best is before and most_rows == row_tiles):
            break  # with all rows at a time, more chunks are only slower
    return best


def torchs_time(m: int, k: int, n: int) -> float:
    """Return about how long torch's fp32 product takes, in seconds."""
    return 2 * m * k * n / TORCHS_RATE + LAUNCH_TIME


def is_worth(m: int, k: int, n: int, multiprocessors: int) -> bool:
    """Return whether a product is thought to be faster here than torch's."""
    return choose(m, k, n, multiprocessors).time <= WORTH * torchs_time(m, k, n)


def _row_counts(most: int, column_tiles: int, multiprocessors: int) -> list[int]:
    """Return numbers of tiles of rows to consider: all that fit, and those that fill the device."""
    found = {most}
    for rounds in (1, 2, 4, 8, 16):
        for splits in (1, 2, 4):
            found.add(rounds * multiprocessors // (column_tiles * splits))
    return [rows for rows in sorted(found) if 0 < rows <= most]


def _split_counts(tiles_at_once: int, depth: int, multiprocessors: int) -> list[int]:
    """Return numbers of ranges to consider: one where there are tiles enough."""
    if tiles_at_once >= 2 * multiprocessors:
        return [1]
    return [splits for splits in (1, 2, 3, 4, 5, 6, 8, 11, 16) if splits <= depth]


def _time(
    sizes: tuple[int, int, int], rows: int, depth: int, splits: int, multiprocessors: int
) -> float:
    """Return about how long a product takes in chunks of `rows` tiles and `depth` pieces."""
    row_tiles, depth_tiles, column_tiles = sizes
    columns = column_tiles * COLUMNS
    depth_chunks = tiles(depth_tiles, depth)
    whole, left = divmod(row_tiles, rows)
    chunk = whole * _chunk_time(rows, column_tiles, depth, splits, multiprocessors)
    if left:
        chunk += _chunk_time(left, column_tiles, depth, splits, multiprocessors)
    # The result is read and written again.
    again = 2 * 4 * row_tiles * ROWS * columns * (depth_chunks - 1) * BYTE_TIME
    return depth_chunks * (chunk + columns * depth * DEPTH * (4 + 6) * BYTE_TIME) + again


def _chunk_time(
    rows: int, column_tiles: int, depth: int, splits: int, multiprocessors: int
) -> float:
    rounds = tiles(rows * column_tiles * splits, multiprocessors)
    made = rounds * (tiles(depth, splits) * STAGE_TIME + TILE_TIME)
    if splits > 1:
        results = rows * ROWS * column_tiles * COLUMNS
        made += 4 * results * (2 * splits + 1) * BYTE_TIME + LAUNCH_TIME
    apart = rows * ROWS * depth * DEPTH * (4 + 6) * BYTE_TIME
    return apart + made + 2 * LAUNCH_TIME
