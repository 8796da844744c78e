"""How attention is laid out on Hopper for half precision, where whole warpgroups multiply.

fp32 with TF32 allowed is multiplied as scaled fp16 (scaled.cuh), laid out in the same way.

The kernels are hopper_forward.cu, hopper_backward.cu and hopper_weights.cu. Their warps hold sums
only: operands are read from shared memory by the tensor cores themselves. A multiprocessor's
registers and shared memory take four warpgroups at a time, of one, two or four heads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from hfai.kernels.jit import DeviceLimits

ARCHITECTURE = "sm_90a"
"""What NVRTC compiles for: the products of warpgroups are in no later architecture."""
TILE = 64
"""Rows or keys of a warpgroup's product, and the most elements of a head."""
TILE_BYTES = TILE * 128
GROUPS = 4
"""Warpgroups of a multiprocessor, at up to 128 registers a thread."""
MOST_CHUNK = 64
"""Keys whose scores forward has in registers at a time."""
PASS_ROWS = 32
"""Rows whose scores backward has in registers: with 64 the compiler finds no room for products
that run beside anything."""
RESERVED_BYTES = 1024
MAXIMA = 3
"""Numbers of each warp in forward's shared memory, from which fp32's scales come."""


@dataclass(frozen=True)
class HopperForwardPlan:
    """The launch shape and compile-time constants of hopper_forward.cu."""

    head: int
    groups: int
    """Warpgroups of a block."""
    row_tiles: int
    """Tiles of 64 rows, of a head."""
    chunk: int
    """Keys whose scores are in registers at a time."""
    chunks: int
    min_blocks: int
    """Blocks of a multiprocessor that the compiler leaves registers for."""
    parts: int = 1
    """Blocks that share the rows of a head."""
    scaled: bool = False
    """Whether memory holds fp32."""

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        keys = self.chunk * self.chunks
        maxima = 16 * MAXIMA * self.groups * self.scaled
        return 2 * keys * 128 + self.row_tiles * TILE_BYTES + 4 * keys + maxima

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "HEAD": self.head,
            "GROUPS": self.groups,
            "ROW_TILES": self.row_tiles,
            "CHUNK": self.chunk,
            "CHUNKS": self.chunks,
            "MIN_BLOCKS": self.min_blocks,
        }


@dataclass(frozen=True)
class HopperBackwardPlan:
    """The launch shape and compile-time constants of hopper_backward.cu."""

    head: int
    groups: int
    """Warpgroups of a block, of which each has 64 keys."""
    row_tiles: int
    """Tiles of 64 rows, of a head."""
    pass_rows: int
    """Rows whose scores are in registers at a time."""
    overlaid: bool
    """Whether the last tile's dS lies over the first tiles of q and dout."""
    min_blocks: int
    """Blocks of a multiprocessor that the compiler leaves registers for."""
    scaled: bool = False
    """Whether memory holds fp32."""

    @property
    def needs_out(self) -> bool:
        """Whether the kernel reads forward's output."""
        return self.groups > 1

    @property
    def key_block(self) -> int:
        """Keys that a block works on at a time."""
        return TILE * self.groups

    @property
    def key_blocks(self) -> int:
        """Of a head."""
        return 1

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        heads = 2 * (self.groups + self.row_tiles) * TILE_BYTES
        dscores = (self.row_tiles - self.overlaid) * self.groups * TILE_BYTES
        rows = TILE * self.row_tiles
        delta = rows if self.needs_out else 2 * 4 * self.pass_rows
        return heads + dscores + 4 * (delta + (1 + self.scaled) * rows)

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "HEAD": self.head,
            "GROUPS": self.groups,
            "ROW_TILES": self.row_tiles,
            "PASS_ROWS": self.pass_rows,
            "OVERLAID": self.overlaid,
            "MIN_BLOCKS": self.min_blocks,
        }


@dataclass(frozen=True)
class HopperWeightsPlan:
    """The launch shape and compile-time constants of hopper_weights.cu."""

    head: int
    groups: int
    """Warpgroups of a block."""
    tile: int
    """Keys whose scores are in registers at a time."""
    tiles: int
    """Of a warpgroup."""
    min_blocks: int
    """Blocks of a multiprocessor that the compiler leaves registers for."""
    rows: int = TILE
    """Rows that a block takes."""
    scaled: bool = False
    """Whether memory holds fp32."""

    @property
    def chunk(self) -> int:
        """Keys that a block takes."""
        return self.tile * self.tiles * self.groups

    @property
    def threads(self) -> int:
        """Of a block."""
        return 128 * self.groups

    @property
    def shared_bytes(self) -> int:
        """Dynamic shared memory of a block."""
        maxima = 16 * 2 * self.groups * self.scaled
        return (2 - self.scaled) * (self.rows + self.chunk) * 128 + 4 * self.chunk + maxima

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "HEAD": self.head,
            "GROUPS": self.groups,
            "CHUNK": self.tile,
            "CHUNKS": self.tiles,
            "MIN_BLOCKS": self.min_blocks,
        }


def covers(head: int, dtype: torch.dtype, keys: int, limits: DeviceLimits) -> bool:
    """Return whether these kernels are the ones for a device and shapes within `plan`'s limits."""
    return (
        limits.architecture == "sm_90"
        and TILE // 2 < head <= TILE
        # Of fewer half types are bound by memory either way, and backward need not read out.
        and keys > (TILE if dtype.itemsize == 2 else TILE // 2)
    )


def choose_forward(
    head: int, dtype: torch.dtype, rows: int, keys: int, limits: DeviceLimits
) -> HopperForwardPlan:
    """Return forward's plan for what `covers` returned True for."""
    row_tiles = -(-rows // TILE)
    chunks = -(-keys // MOST_CHUNK)
    chunk = -(-keys // (chunks * 16)) * 16
    # Of few rows four blocks load and multiply in turns: 0.146 ms in place of 0.188 at 128.
    groups = 1 if row_tiles <= 2 else 2
    scaled = dtype.itemsize == 4
    plan = HopperForwardPlan(head, groups, row_tiles, chunk, chunks, 1, scaled=scaled)
    return replace(plan, min_blocks=_blocks(plan, limits))


def choose_backward(
    head: int, dtype: torch.dtype, rows: int, keys: int, limits: DeviceLimits
) -> HopperBackwardPlan:
    """Return backward's plan for what `covers` returned True for."""
    groups, row_tiles, scaled = -(-keys // TILE), -(-rows // TILE), dtype.itemsize == 4
    plan = HopperBackwardPlan(head, groups, row_tiles, PASS_ROWS, False, 1, scaled=scaled)
    if plan.shared_bytes > limits.shared_bytes_per_block:
        plan = replace(plan, overlaid=True)
    return replace(plan, min_blocks=_blocks(plan, limits))


def choose_weights(
    head: int, dtype: torch.dtype, keys: int, limits: DeviceLimits
) -> HopperWeightsPlan:
    """Return the plan of averaged weights for what `covers` returned True for."""
    if dtype.itemsize == 4:  # the next head's rows are in registers: more threads have fewer each
        groups, tile = (2, 32) if keys <= TILE else (2, 64) if keys <= 2 * TILE else (4, 64)
        plan = HopperWeightsPlan(head, groups, tile, 1, 1, scaled=True)
    else:
        plan = HopperWeightsPlan(head, 1 if keys <= 2 * TILE else 2, 64, 2, 1)
    return replace(plan, min_blocks=_blocks(plan, limits))


def _blocks(
    plan: HopperForwardPlan | HopperBackwardPlan | HopperWeightsPlan, limits: DeviceLimits
) -> int:
    # A block may ask for 1 KB less than the multiprocessor has.
    by_memory = (limits.shared_bytes_per_block + 1024) // (plan.shared_bytes + RESERVED_BYTES)
    return min(by_memory, GROUPS // plan.groups)
