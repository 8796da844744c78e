"""How a product is cut: into ranges of rows and of the summed dimension, and among blocks.

Pure arithmetic on sizes, so that it can be read and tested without a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass

# Of pieces.cuh and product.cu.
ROWS, DEPTH, COLUMNS = 128, 32, 256
PIECE_PITCH = 3 * ROWS * DEPTH * 2 + 128
STAGES = 3
STAGE_PITCH = -(-(PIECE_PITCH - 112) // 1024) * 1024
SHARED_BYTES = STAGES * 3 * STAGE_PITCH + 2 * STAGES * 8
SPLIT_THREADS, SUM_THREADS = 256, 256
THREADS = 3 * 128

MOST_SPLITS = 16
MOST_WORKSPACE = 192 * 2**20  # bytes that operands taken apart may have at a time

# Seconds on an H200.
STAGE_TIME = 1.9e-6  # 32 of the summed dimension of one tile
TILE_TIME = 3e-6  # what a tile takes besides: filling the pipeline, storing
BYTE_TIME = 1 / 3.5e12


@dataclass(frozen=True)
class Plan:
    """Of out [m, n] = a [m, k] b [k, n]."""

    row_chunk: int
    """Rows of a that are taken apart at a time."""
    depth_chunk: int
    """Of the summed dimension, at a time."""
    splits: int
    """Ranges of a chunk's summed dimension whose results lie apart at first."""


def pieces(rows: int, depth: int, row_tile: int = ROWS) -> int:
    """Return the bytes of a matrix that was taken apart, its rows in whole tiles."""
    return -(-rows // row_tile) * (row_tile // ROWS) * -(-depth // DEPTH) * PIECE_PITCH


def choose(m: int, k: int, n: int, multiprocessors: int) -> Plan:
    """Return the plan of a product that is large enough to be one of these."""
    row_chunk, depth_chunk = m, k
    # b stays whole beside a range of a's rows, unless it is large itself.
    while pieces(row_chunk, depth_chunk) + pieces(n, depth_chunk, COLUMNS) > MOST_WORKSPACE:
        most = MOST_WORKSPACE // 2
        if pieces(n, depth_chunk, COLUMNS) > most and depth_chunk > DEPTH:
            depth_chunk = _half(depth_chunk, DEPTH)
        elif row_chunk > ROWS and row_chunk >= n:
            row_chunk = _half(row_chunk, ROWS)
        elif depth_chunk > DEPTH:
            depth_chunk = _half(depth_chunk, DEPTH)
        elif row_chunk > ROWS:
            row_chunk = _half(row_chunk, ROWS)
        else:
            break
    splits = min(
        range(1, MOST_SPLITS + 1),
        key=lambda splits: duration(row_chunk, depth_chunk, n, splits, multiprocessors),
    )
    return Plan(row_chunk, depth_chunk, splits)


def duration(m: int, k: int, n: int, splits: int, multiprocessors: int) -> float:
    """Return about how long product.cu and sum.cu take, in seconds."""
    tiles = -(-m // ROWS) * -(-n // COLUMNS)
    rounds = -(-tiles * splits // multiprocessors)
    stages = -(--(-k // DEPTH) // splits)
    made = rounds * (stages * STAGE_TIME + TILE_TIME)
    return made if splits == 1 else made + 4 * m * n * (2 * splits + 1) * BYTE_TIME + 3e-6


def _half(size: int, unit: int) -> int:
    return -(-size // (2 * unit)) * unit
