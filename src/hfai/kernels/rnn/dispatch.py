"""Which plan a layer gets, and the sizes at which torch's own kernels are left to it.

A step takes as long as its exchanges between blocks, each tile's products, and the bytes that go
through the second-level cache; groups that do not fit on the device at once come one after the
other.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn.plan import Cell, Plan, Precision

UNITS = (8, 16)
TILES = (1, 2, 4, 8)
WIDEST = 16  # sequences of a tile
WARPS = ((8, 8), (16, 8), (8, 16), (16, 16))

# Measured on an H200 (docs/kernels/rnn.md): below these cuDNN's own small kernels, or its launches
# a step, take less time than ours; beyond the last its matrix products are well filled.
FEWEST_STEPS = 32
FEWEST_UNITS = {Cell.LSTM: 129, Cell.GRU: 193, Cell.RNN_TANH: 385, Cell.RNN_RELU: 385}
MOST_TILES = 4
# The largest batch that was timed in TF32 and half precision. In fp32's own precision LSTM 200 and
# 256 and GRU 256 ran at 1.1 to 1.4 times torch's speed with 64 sequences, at 0.6 to 0.9 with 128.
MOST_SEQUENCES = 64

# Of many blocks that look as soon as they have sent, all look in vain, and the looks delay what is
# being sent: forward waits so many cycles first. With fewer blocks that gains nothing, nor in half
# precision with four columns, whose words are half as many. LSTM 985, batch 4 on an H200, us a step
# after 0, 300, 600, 900 cycles: TF32 1.67, 1.65, 1.635, 1.64; bf16 1.29, 1.33, 1.44, 1.46; own
# precision, after 300, 600, 900: 2.31, 2.26, 2.15.
LOOK_AFTER = 900
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
            _step_time(plan, batch, limits),
            not plan.wide_rest,  # accuracy, where it costs no time
            plan.units if plan.cell.gates > 1 else -plan.units,
            plan.forward_warps != _forward_warps(plan),
            plan.backward_warps != _backward_warps(plan),
        )

    return min(fitting, key=cost)


def _plans(
    cell: Cell, hidden: int, directions: int, batch: int, precision: Precision
) -> Iterator[Plan]:
    for units, columns in itertools.product(UNITS, _columns(batch, precision)):
        many = -(-hidden // units) >= MANY_BLOCKS
        small = precision is Precision.HALF and columns == 4
        for tiles in TILES:
            if tiles > 1 and (tiles // 2) * columns >= batch:
                break  # more tiles than sequences
            for forward_warps, backward_warps in WARPS:
                for wide in (True, False) if precision is Precision.SPLIT else (False,):
                    yield Plan(
                        cell, hidden, directions, precision, units, columns, tiles,
                        forward_warps, backward_warps, wide,
                        most_at_once=8 if precision is Precision.SPLIT else 4,
                        forward_look_after=LOOK_AFTER if many and not small else 0,
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
    precision 2.15 / 2.26; GRU 1.85 / 1.68; LSTM 1024, fp16, batch 8 1.71 / 1.62, bf16, batch 64 in
    tiles of 16 5.39 / 5.36; GRU 512, TF32, batch 64, 32 blocks, one tile of 16 3.29 / 2.84; LSTM 256,
    both directions, batch 32, 16 blocks, one tile of 8 1.50 / 1.56.
    """
    if plan.precision is Precision.SPLIT or plan.tiles > 1:
        return 8
    return 16 if plan.blocks >= MANY_BLOCKS or plan.eights > 1 else 8


def _backward_warps(plan: Plan) -> int:
    """As `_forward_warps`.

    The first four of the same layers: 2.03 / 2.17, 1.87 / 1.91, 2.33 / 2.51, 1.95 / 2.07; the next two
    2.01 / 2.07, 4.29 / 5.26; LSTM 985, TF32, batch 32, two tiles of 16 6.48 / 7.59.
    """
    return 8


def _step_time(plan: Plan, batch: int, limits: DeviceLimits) -> float:
    groups, waves = plan.groups(batch), _waves(plan, batch, limits)
    sent = 2 * plan.mailbox_floats(groups)  # bytes a step: half of the floats, 4 bytes each
    read = READ_FROM_SHARED * (plan.forward_in_shared + plan.backward_in_shared)
    tile = TILE * plan.row_tiles * (1 + FURTHER_EIGHT * (plan.eights - 1)) + read
    return waves * (EXCHANGE + plan.tiles * tile) + sent / SENT_BYTES


def _waves(plan: Plan, batch: int, limits: DeviceLimits) -> int:
    at_once = limits.multiprocessors // plan.blocks
    return -(-plan.groups(batch) // at_once)


def why_left_to_torch(plan: Plan, batch: int, steps: int, limits: DeviceLimits) -> str | None:
    """Return why a call is left to torch, or None where our kernels are faster."""
    if steps < FEWEST_STEPS:
        return f"{steps} steps are too few to pay for loading the weights"
    if plan.hidden < FEWEST_UNITS[plan.cell]:
        return f"cuDNN has a faster kernel for {plan.hidden} hidden units"
    if batch > MOST_SEQUENCES:
        return f"a batch of {batch} was not faster here, or not timed"
    if _waves(plan, batch, limits) * plan.tiles * plan.eights > MOST_TILES:
        return f"a batch of {batch} is faster as one matrix product a step"
    return None
