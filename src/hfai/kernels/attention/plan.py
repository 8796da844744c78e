"""How attention is laid out on a device, and whether it fits: tiles, warps, shared memory.

What decides is registers: a warp keeps scores and sums of 16 rows, or of 32 (so that each operand
loaded from shared memory is multiplied twice), next to as many keys at a time as there is room for.
The estimates are checked against the assembler's own figures in tests/kernels/attention.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from hfai.kernels.attention import hopper
from hfai.kernels.attention.hopper import HopperBackwardPlan, HopperForwardPlan, HopperWeightsPlan
from hfai.kernels.jit import DeviceLimits

MOST_ROWS = 256
MOST_KEYS = 256
MOST_HEAD_DIM = 128
REGISTERS = 512
"""Of a lane of one of a multiprocessor's four parts, among which warps are dealt out."""
MOST_REGISTERS = 255
"""Of a thread."""
RESERVED_BYTES = 1024
"""Of shared memory, by the driver, for each block."""


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def _row_bytes(head: int, itemsize: int) -> int:
    """Return the bytes of shared memory between two rows of a head (tiles.cuh: PITCH)."""
    return _round_up(head, 16) * itemsize + 16


@dataclass(frozen=True)
class ForwardPlan:
    """The launch shape and compile-time constants of forward.cu."""

    head: int
    itemsize: int
    warps: int
    row_tiles: int
    """Tiles of 16 rows that a warp takes at a time."""
    chunk: int
    """Keys whose scores are in registers at a time."""
    chunks: int
    parts: int
    """Blocks that share the rows of a head."""
    min_blocks: int
    """Blocks of a multiprocessor that the compiler leaves registers for."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        keys, rows = self.chunk * self.chunks, 16 * self.row_tiles * self.warps
        return (2 * keys + rows) * _row_bytes(self.head, self.itemsize) + 4 * keys

    @property
    def registers(self) -> int:
        """An estimate of the registers a thread needs."""
        width = _round_up(self.head, 16)
        operands = width * self.itemsize // 8 + max(0, width - 64) // 2
        return self.row_tiles * (self.chunk // 2 + width // 2 + 8) + operands + 40

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "HEAD": self.head,
            "WARPS": self.warps,
            "ROW_TILES": self.row_tiles,
            "CHUNK": self.chunk,
            "CHUNKS": self.chunks,
            "MIN_BLOCKS": self.min_blocks,
        }


@dataclass(frozen=True)
class BackwardPlan:
    """The launch shape and compile-time constants of backward.cu."""

    head: int
    itemsize: int
    warps: int
    row_tiles: int
    key_block: int
    """Keys that a block works on at a time."""
    key_blocks: int
    key_tile: int
    """Keys of one warp's part of dk or dv."""
    column_tile: int
    """Columns of it."""
    min_blocks: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def needs_out(self) -> bool:
        """Whether the kernel reads forward's output."""
        return self.key_blocks > 1

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        rows = 16 * self.row_tiles * self.warps
        heads = 2 * (rows + self.key_block) * _row_bytes(self.head, self.itemsize)
        scores = 2 * rows * (self.key_block * self.itemsize + 16)
        return heads + scores + 4 * rows + 4 * self.key_block * self.key_blocks

    @property
    def registers(self) -> int:
        """An estimate of the registers a thread needs."""
        width = _round_up(self.head, 16)
        kept = self.key_block // (4 if self.itemsize == 2 else 2)
        rows = self.row_tiles * (self.key_block // 2 + kept + width // 2 + 12)
        gradients = self.row_tiles * width // 2 + self.key_tile * self.column_tile // 32
        if self.row_tiles == 1:
            return max(rows + 36, gradients + 32)
        return max(rows, gradients) + 44

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "HEAD": self.head,
            "WARPS": self.warps,
            "ROW_TILES": self.row_tiles,
            "KEY_BLOCK": self.key_block,
            "KEY_BLOCKS": self.key_blocks,
            "KEY_TILE": self.key_tile,
            "COLUMN_TILE": self.column_tile,
            "MIN_BLOCKS": self.min_blocks,
        }


@dataclass(frozen=True)
class WeightsPlan:
    """The launch shape and compile-time constants of weights.cu."""

    head: int
    itemsize: int
    warps: int
    chunk: int
    min_blocks: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps

    @property
    def rows(self) -> int:
        """Rows that a block takes."""
        return 16 * self.warps

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        row = _row_bytes(self.head, self.itemsize)
        return 2 * (self.rows + self.chunk) * row + 4 * self.chunk

    @property
    def registers(self) -> int:
        """An estimate of the registers a thread needs."""
        return min(self.chunk + 72 + _round_up(self.head, 16) * self.itemsize // 4, 248)

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "HEAD": self.head,
            "WARPS": self.warps,
            "CHUNK": self.chunk,
            "MIN_BLOCKS": self.min_blocks,
        }


def blocks_that_fit(plan: ForwardPlan | BackwardPlan | WeightsPlan, limits: DeviceLimits) -> int:
    """Return how many blocks of a plan a multiprocessor runs at once, by its own estimates."""
    # A block may ask for 1 KB less than the multiprocessor has.
    shared = (limits.shared_bytes_per_block + 1024) // (plan.shared_bytes + RESERVED_BYTES)
    registers = _round_up(plan.registers, 8)
    if plan.shared_bytes > limits.shared_bytes_per_block or registers > MOST_REGISTERS + 1:
        return 0
    return min(shared, 4 * (REGISTERS // registers) // plan.warps, 16)


@functools.cache
def choose_forward(
    head: int,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    limits: DeviceLimits,
    split: bool = False,
) -> ForwardPlan | HopperForwardPlan | None:
    """Return forward's plan, or None where none fits the device; `split` as in `precision`."""
    if not split and hopper.covers(head, dtype, keys, limits):
        return hopper.choose_forward(head, dtype, rows, keys, limits)
    for row_tiles, warps, most_keys in _forward_shapes(head, dtype.itemsize, rows, keys):
        chunks = -(-keys // most_keys)
        chunk = _round_up(-(-keys // chunks), 16)
        plan = ForwardPlan(head, dtype.itemsize, warps, row_tiles, chunk, chunks, 1, 1)
        blocks = blocks_that_fit(plan, limits)
        if blocks:
            return replace(plan, min_blocks=blocks)
    return None


def _forward_shapes(
    head: int, itemsize: int, rows: int, keys: int
) -> Iterator[tuple[int, int, int]]:
    """Yield row tiles, warps and the most keys of a chunk, the best first."""
    tiles = -(-rows // 16)
    if keys > 128 or rows > 128:
        if itemsize == 4 and head <= 64:
            yield 2, min(8, -(-tiles // 2)), 64
        yield 1, -(-tiles // -(-tiles // 8)), 64  # equal shares of at most eight tiles
    yield 1, min(4, tiles), 128
    yield 1, min(4, tiles), 64
    yield 1, min(4, tiles), 32


@functools.cache
def choose_backward(
    head: int,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    limits: DeviceLimits,
    split: bool = False,
) -> BackwardPlan | HopperBackwardPlan | None:
    """Return backward's plan, or None where none fits the device; `split` as in `precision`."""
    if not split and hopper.covers(head, dtype, keys, limits):
        return hopper.choose_backward(head, dtype, rows, keys, limits)
    tiles = -(-rows // 16)
    # Two tiles a warp load operands half as often, where there are registers for it.
    few = rows <= (64 if dtype.itemsize == 2 and head <= 64 else 128)
    for row_tiles in (1, 2) if few else (2, 1):
        warps = -(-tiles // row_tiles)
        for most_keys in (64, 48, 32, 16):
            blocks = -(-keys // most_keys)
            key_block = _round_up(-(-keys // blocks), 16)
            key_tile, column_tile = _gradient_tile(head, key_block, warps)
            plan = BackwardPlan(
                head, dtype.itemsize, warps, row_tiles, key_block, blocks, key_tile, column_tile, 1
            )
            fitting = blocks_that_fit(plan, limits)
            if fitting:
                return replace(plan, min_blocks=fitting)
    return None


def _gradient_tile(head: int, key_block: int, warps: int) -> tuple[int, int]:
    """Return keys and columns of a warp's tile of dk or dv that take the least time."""
    width = _round_up(head, 16)

    def time(tile: tuple[int, int]) -> float:
        key_tile, column_tile = tile
        items = 2 * (key_block // key_tile) * (width // column_tile)
        # Cycles for 16 rows: products, and operands from shared memory, of all warps.
        products = 1.6 * key_tile * column_tile / 128
        loads = 4.0 * (key_tile + column_tile) / 16
        return -(-items // warps) * max(products, loads) * warps

    tiles = [
        (key_tile, column_tile)
        for key_tile in (16, 32)
        if key_block % key_tile == 0
        for column_tile in (16, 32, 48, 64)
        if width % column_tile == 0
    ]
    return min(tiles, key=lambda tile: (time(tile), -tile[0] * tile[1]))


@functools.cache
def choose_weights(
    head: int,
    dtype: torch.dtype,
    rows: int,
    keys: int,
    limits: DeviceLimits,
    split: bool = False,
    averaged: bool = False,
) -> WeightsPlan | HopperWeightsPlan | None:
    """Return the weights' plan, or None where none fits the device."""
    if averaged and not split and hopper.covers(head, dtype, keys, limits):
        return hopper.choose_weights(head, dtype, keys, limits)
    for most_warps, most_keys in ((8, 64), (4, 64), (4, 32), (2, 16)):
        warps = min(most_warps, -(-rows // 16))
        chunk = min(most_keys, _round_up(keys, 16))
        plan = WeightsPlan(head, dtype.itemsize, warps, chunk, 1)
        blocks = blocks_that_fit(plan, limits)
        if blocks:
            return replace(plan, min_blocks=blocks)
    return None
