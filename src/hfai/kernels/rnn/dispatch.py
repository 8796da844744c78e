"""Which plan a layer gets, and the sizes at which torch's own kernels are left to it.

A step takes about as long as one exchange between all blocks of a group, plus each tile's products;
groups that do not fit on the device at once come one after the other.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn.plan import Cell, Plan, Precision

UNITS = (8, 16)
TILES = (1, 2, 4, 8)
WARPS = ((8, 8), (16, 8), (8, 16), (16, 16))

# Measured on an H200 (docs/kernels/rnn.md): below these cuDNN's own small kernels, or its launches
# a step, take less time than ours; beyond the last its matrix products are well filled.
FEWEST_STEPS = 16
FEWEST_UNITS = 100
MOST_TILES = 8

# Microseconds of a step, from measurements on an H200: exchange, and a tile's products and sums.
EXCHANGE = 1.0
TILE = 0.35


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

    def cost(plan: Plan) -> tuple[float, ...]:
        return (
            _waves(plan, batch, limits) * (EXCHANGE + TILE * plan.tiles),
            not plan.wide_rest,  # accuracy, where it costs no time
            plan.units if plan.cell.gates > 1 else -plan.units,
            # Forward has more to keep in registers, backward more to do between two waits.
            plan.forward_warps,
            -plan.backward_warps,
        )

    return min(fitting, key=cost)


def _plans(
    cell: Cell, hidden: int, directions: int, batch: int, precision: Precision
) -> Iterator[Plan]:
    columns = 4 if precision is Precision.SPLIT or batch <= 4 else 8
    for units in UNITS:
        for tiles in TILES:
            if tiles > 1 and (tiles // 2) * columns >= batch:
                break  # more tiles than sequences
            for forward_warps, backward_warps in WARPS:
                for wide in (True, False) if precision is Precision.SPLIT else (False,):
                    yield Plan(
                        cell, hidden, directions, precision, units, columns, tiles,
                        forward_warps, backward_warps, wide,
                    )  # fmt: skip


def _waves(plan: Plan, batch: int, limits: DeviceLimits) -> int:
    at_once = limits.multiprocessors // plan.blocks
    return -(-plan.groups(batch) // at_once)


def why_torch_is_faster(plan: Plan, batch: int, steps: int, limits: DeviceLimits) -> str | None:
    """Return why a call of this size is left to torch, or None where our kernels are faster."""
    if steps < FEWEST_STEPS:
        return f"{steps} steps are too few to pay for loading the weights"
    if plan.hidden < FEWEST_UNITS:
        return f"cuDNN has a faster kernel for {plan.hidden} hidden units"
    if _waves(plan, batch, limits) * plan.tiles > MOST_TILES:
        return f"a batch of {batch} is faster as one matrix product a step"
    return None
