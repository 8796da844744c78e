"""Which plan a layer gets, and the sizes at which torch's own kernels are left to it.

A step takes as long as its exchanges between blocks, each tile's products, and the bytes that go
through the second-level cache; groups that do not fit on the device at once come one after the
other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

import torch

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn.plan import Cell, Plan, Precision

UNITS = (8, 16)
TILES = (1, 2, 4, 8)
WIDEST = 16  # sequences of a tile
WARPS = ((8, 8), (16, 8), (8, 16), (16, 16))
# With which backward took less time, where both fit. On an H200, us a step, 8 / 16 warps: LSTM 985,
# batch 4, TF32 2.03 / 2.17, bf16 1.87 / 1.91, own precision 2.33 / 2.51; GRU 1.95 / 2.07; LSTM
# 1024, fp16, batch 8 2.01 / 2.07, bf16, batch 64 in tiles of 16 4.29 / 5.26; LSTM 985, TF32, batch
# 32 in tiles of 16 6.48 / 7.59.
BACKWARD_WARPS = 8
# Microseconds a step that the other number of warps cost more, in those cases and in those of
# `_forward_warps`.
OTHER_WARPS = 0.2

# Measured on an H200 (docs/kernels/rnn.md): below these cuDNN's own small kernels, or its launches
# a step, take less time than ours; beyond the last its matrix products are well filled.
FEWEST_STEPS = 32
FEWEST_UNITS = {Cell.LSTM: 129, Cell.GRU: 193, Cell.RNN_TANH: 385, Cell.RNN_RELU: 385}
# cuDNN has no such kernels for bf16: with 32 to 384 units, 200 steps and batches of 4 and 32,
# forward and backward took a tenth to a seventh of torch's time.
FEWEST_UNITS_IN_BF16 = 1
MOST_TILES = 4
# The largest batch that was timed. In fp32's own precision an earlier version of LSTM 200 and 256
# and GRU 256 ran at 1.1 to 1.4 times torch's speed with 64 sequences, at 0.6 to 0.9 with 128. In
# TF32 and half precision inference of 128 sequences, 200 steps, took, ms, torch / ours: LSTM 256
# and 512, TF32, 3.8 / 0.80 and 5.1 / 1.3; LSTM 512 and GRU 512, bf16, 5.2 / 1.0 and 4.6 / 0.93;
# both passes of all of them took torch 1.6 times ours and more.
MOST_SEQUENCES = 64
MOST_SEQUENCES_IN_EIGHTS = 128

# Of many blocks that look as soon as they have sent, all look in vain, and the looks delay what is
# being sent: forward waits so many cycles first. With fewer blocks that gains nothing, and little
# in half precision with four columns, whose words are half as many. LSTM 985, batch 4 on an H200,
# us a step after 0, 300, 600, 900 cycles: TF32 1.67, 1.65, 1.635, 1.64; bf16 1.29, 1.33, 1.44,
# 1.46; own precision, after 300, 600, 900: 2.31, 2.26, 2.15. A later version, bf16 after 0 and 300:
# 1.42, 1.32.
LOOK_AFTER = 900
LOOK_AFTER_SMALL = 300
MANY_BLOCKS = 64

# Microseconds of a step of both passes, fitted to 20 plans measured on an H200: the exchanges, a
# tile's products and sums for 16 rows, and what backward sends, in bytes a microsecond.
EXCHANGE = 1.0
TILE = 0.55
FURTHER_EIGHT = 0.6  # of a tile's first eight sequences, another eight of the same tile
SENT_BYTES = 2.2e6
# Of one fragment for 16 rows that every warp reads from shared memory, by its size and the 128
# bytes a cycle of a multiprocessor; not measured.
READ_FROM_SHARED = 0.04


@functools.cache
def choose(
    cell: Cell,
    hidden: int,
    directions: int,
    batch: int,
    precision: Precision,
    limits: DeviceLimits,
) -> Plan | None:
    """Return the plan that should be the fastest, or None where none fits the device."""
    fitting = [
        plan for plan in _plans(cell, hidden, directions, batch, precision) if plan.fits(limits)
    ]
    if not fitting:
        return None
    # Registers are read at once; shared memory is for what has no room in them.
    fitting = [plan for plan in fitting if not _reads_shared(plan)] or fitting

    def cost(plan: Plan) -> tuple[float, ...]:
        return (
            _step_time(plan, batch, limits)
            + OTHER_WARPS * (plan.forward_warps != _forward_warps(plan))
            + OTHER_WARPS * (plan.backward_warps != BACKWARD_WARPS),
            not plan.wide_rest,  # accuracy, where it costs no time
            plan.units if plan.cell.gates > 1 else -plan.units,
        )

    return min(fitting, key=cost)


def _plans(
    cell: Cell, hidden: int, directions: int, batch: int, precision: Precision
) -> Iterator[Plan]:
    for units, columns in itertools.product(UNITS, _columns(batch, precision)):
        many = -(-hidden // units) >= MANY_BLOCKS
        small = precision is Precision.HALF and columns == 4
        look_after = LOOK_AFTER_SMALL if small else LOOK_AFTER
        for tiles in TILES:
            if tiles > 1 and (tiles // 2) * columns >= batch:
                break  # more tiles than sequences
            for forward_warps, backward_warps in WARPS:
                for wide in (True, False) if precision is Precision.SPLIT else (False,):
                    yield Plan(
                        cell, hidden, directions, precision, units, columns, tiles,
                        forward_warps, backward_warps, wide,
                        most_at_once=8 if precision is Precision.SPLIT else 4,
                        forward_look_after=look_after if many else 0,
                        # With four columns a message is a line of the cache at most either way,
                        # and lines are what counts: measured to gain nothing there.
                        short_messages=precision is Precision.HALF and columns >= 8,
                    )  # fmt: skip


def _columns(batch: int, precision: Precision) -> tuple[int, ...]:
    if precision is Precision.SPLIT or batch <= 4:
        return (4,)
    return tuple(columns for columns in (8, 16) if columns <= min(WIDEST, max(8, batch)))


def _reads_shared(plan: Plan) -> bool:
    return plan.forward_in_shared + plan.backward_in_shared > 0


def _forward_warps(plan: Plan) -> int:
    """Return the warps with which a step took less time, where both fit.

    On an H200, us a step, 8 / 16 warps: LSTM 985, batch 4, TF32 1.58 / 1.55, bf16 1.32 / 1.26, own
    precision 2.24 / 2.02; GRU 1.85 / 1.68; LSTM 1024, fp16, batch 8 1.71 / 1.62, bf16, batch 64 in
    tiles of 16 4.64 / 4.88; LSTM 985, TF32, batch 32 in tiles of 16 5.30 / 5.84; GRU 512, TF32,
    batch 64, 32 blocks, one tile of 16 3.29 / 2.84; LSTM 256, both directions, batch 32, 16 blocks,
    one tile of 8 1.50 / 1.56.
    """
    if plan.tiles > 1:
        return 8
    return 16 if plan.blocks >= MANY_BLOCKS or plan.eights > 1 else 8


def _step_time(plan: Plan, batch: int, limits: DeviceLimits) -> float:
    groups, waves = plan.groups(batch), _waves(plan, batch, limits)
    sent = 2 * plan.mailbox_floats(groups)  # bytes a step: half of the floats, 4 bytes each
    read = READ_FROM_SHARED * (plan.forward_in_shared + plan.backward_in_shared)
    tile = TILE * plan.row_tiles * (1 + FURTHER_EIGHT * (plan.eights - 1)) + read
    return waves * (EXCHANGE + plan.tiles * tile) + sent / SENT_BYTES


def _waves(plan: Plan, batch: int, limits: DeviceLimits) -> int:
    at_once = limits.multiprocessors // plan.blocks
    return -(-plan.groups(batch) // at_once)


def why_left_to_torch(
    plan: Plan, dtype: torch.dtype, batch: int, steps: int, limits: DeviceLimits
) -> str | None:
    """Return why a call is left to torch, or None where our kernels are faster."""
    fewest = FEWEST_UNITS_IN_BF16 if dtype is torch.bfloat16 else FEWEST_UNITS[plan.cell]
    if steps < FEWEST_STEPS:
        return f"{steps} steps are too few to pay for loading the weights"
    if plan.hidden < fewest:
        return f"cuDNN has a faster kernel for {plan.hidden} hidden units"
    in_eights = plan.eights > 1 and plan.cell.gates > 1
    if batch > (MOST_SEQUENCES_IN_EIGHTS if in_eights else MOST_SEQUENCES):
        return f"a batch of {batch} was not faster here, or not timed"
    if _waves(plan, batch, limits) * plan.tiles * plan.eights > MOST_TILES:
        return f"a batch of {batch} is faster as one matrix product a step"
    return None
