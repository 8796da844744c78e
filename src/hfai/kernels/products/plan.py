"""How a product is cut: into ranges of rows and of the summed dimension, and among blocks.

Pure arithmetic on sizes, so that it can be read and tested without a GPU.
"""

from __future__ import annotations

import functools
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

MOST_SPLITS = 16
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


@functools.lru_cache(maxsize=4096)
def choose(m: int, k: int, n: int, multiprocessors: int) -> Plan:
    """Return the plan that is thought the fastest of those that fit into `workspace`."""
    room = workspace(m, k, n)
    best: Plan | None = None
    depth_tiles, row_tiles, column_tiles = tiles(k, DEPTH), tiles(m, ROWS), tiles(n, COLUMNS)
    for chunks in _CHUNKS:
        depth = tiles(depth_tiles, chunks)
        right = piece_bytes(n, depth * DEPTH, COLUMNS)
        most_rows = min(row_tiles, (room - right) // (depth * PIECE_PITCH))
        for rows in _row_counts(most_rows, column_tiles, multiprocessors):
            for splits in range(1, min(MOST_SPLITS, depth) + 1):
                parts = 4 * splits * rows * ROWS * n if splits > 1 else 0
                if parts + right + rows * depth * PIECE_PITCH > room:
                    break
                time = _time(m, k, n, rows, depth, splits, multiprocessors)
                if best is None or time < best.time:
                    best = Plan(min(m, rows * ROWS), min(k, depth * DEPTH), splits, time)
        if depth == 1:
            break
    # Rows of b alone may not fit: one tile of everything is then the least that can be done.
    return best or Plan(ROWS, DEPTH, 1, float("inf"))


def torchs_time(m: int, k: int, n: int) -> float:
    """Return about how long torch's fp32 product takes, in seconds."""
    return 2 * m * k * n / TORCHS_RATE + LAUNCH_TIME


def is_worth(m: int, k: int, n: int, multiprocessors: int) -> bool:
    """Return whether a product is thought to be faster here than torch's."""
    return choose(m, k, n, multiprocessors).time <= WORTH * torchs_time(m, k, n)


def _row_counts(most: int, column_tiles: int, multiprocessors: int) -> list[int]:
    """Return numbers of tiles of rows to consider: all that fit, and those that fill the device."""
    found = {most}
    for rounds in (1, 2, 3, 4, 6, 8, 12, 16):
        for splits in (1, 2, 4):
            found.add(rounds * multiprocessors // (column_tiles * splits))
    return [rows for rows in sorted(found) if 0 < rows <= most]


def _time(
    m: int, k: int, n: int, rows: int, depth: int, splits: int, multiprocessors: int
) -> float:
    """Return about how long a product takes in chunks of `rows` tiles and `depth` pieces."""
    row_tiles, column_tiles, depth_tiles = tiles(m, ROWS), tiles(n, COLUMNS), tiles(k, DEPTH)
    depth_chunks = tiles(depth_tiles, depth)
    whole, left = divmod(row_tiles, rows)
    total = depth_chunks * (
        _split_time(n, depth)
        + whole * _chunk_time(rows, column_tiles, depth, splits, n, multiprocessors)
    )
    if left:
        total += depth_chunks * _chunk_time(left, column_tiles, depth, splits, n, multiprocessors)
    again = 2 * 4 * m * n * (depth_chunks - 1) * BYTE_TIME  # the result, read and written again
    return total + again


def _split_time(rows: int, depth: int) -> float:
    return rows * depth * DEPTH * (4 + 6) * BYTE_TIME + LAUNCH_TIME


def _chunk_time(
    rows: int, column_tiles: int, depth: int, splits: int, n: int, multiprocessors: int
) -> float:
    rounds = tiles(rows * column_tiles * splits, multiprocessors)
    made = rounds * (tiles(depth, splits) * STAGE_TIME + TILE_TIME)
    if splits > 1:
        made += 4 * rows * ROWS * n * (2 * splits + 1) * BYTE_TIME + LAUNCH_TIME
    return _split_time(rows * ROWS, depth) + made + LAUNCH_TIME
