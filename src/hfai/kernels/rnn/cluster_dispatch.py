"""Which layers run on clusters of blocks, and in which shapes.

The shapes are those with the least estimated time; the estimate is fitted to what was measured on
an H200 (docs/kernels/rnn_cluster.md), and orders shapes rather than predicts times. Whether
clusters are used at all is decided by bounds that were measured, below which they beat both the
kernels that exchange through the second-level cache and cuDNN's.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn.cluster_plan import ClusterPlan, Shape
from hfai.kernels.rnn.plan import Cell, Precision

CLUSTERS = (1, 2, 4, 8, 16)
WARPS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16)
MOST_TILES = 4  # of a warp of forward

# Nanoseconds of a step, fitted to a hundred shapes of LSTM 32 to 256 on an H200. What a block reads
# and writes of a step's gates and states costs by its lines, of which a tile of forward has as many
# as columns, and backward as many as cells: hence as many blocks as there are.
FORWARD, BACKWARD = 370.0, 630.0
TILE_COLUMN, FREE_TILE_COLUMNS = 9.3, 16
CHAINED = 18.0  # a product that waits for the one before
CELL, FREE_CELLS = 2.6, 100
UNIT = 0.7  # of the layer, for what is exchanged
ROUND = 100.0  # of backward's cells, one for each thread
# What arrives in pieces of 8 bytes (half precision, one tile a warp) takes longer than in 16.
SHORT_PIECE = 0.6
# Clusters that find room at once, where it is not multiprocessors / size.
AT_ONCE = {16: 7}

# Hidden sizes, and the largest batch, at which clusters were measured on an H200 to be faster than
# the other kernels and than cuDNN (docs/kernels/rnn_cluster.md). In half precision cuDNN is slow at
# every size, so they begin at 1; in TF32 it has a kernel of its own for small ones. In fp32's own
# precision the products around the recurrence decide, and cuDNN's call is faster.
FASTER: dict[Precision, dict[Cell, tuple[tuple[range, int], ...]]] = {
    Precision.HALF: {
        Cell.LSTM: ((range(1, 257), 128),),
        Cell.GRU: ((range(1, 257), 128),),
        Cell.RNN_TANH: ((range(1, 385), 128),),
        Cell.RNN_RELU: ((range(1, 385), 128),),
    },
    Precision.TF32: {
        Cell.LSTM: ((range(96, 128), 64), (range(128, 257), 128)),
        Cell.GRU: ((range(96, 257), 128),),
        Cell.RNN_TANH: ((range(256, 257), 128),),
        Cell.RNN_RELU: ((range(256, 257), 128),),
    },
    Precision.SPLIT: dict.fromkeys(Cell, ()),
}


def most_sequences(cell: Cell, hidden: int, precision: Precision) -> int:
    """Return the largest batch that clusters take."""
    for units, sequences in FASTER[precision][cell]:
        if hidden in units:
            return sequences
    return 0


def choose_where_faster(
    cell: Cell,
    hidden: int,
    directions: int,
    batch: int,
    precision: Precision,
    limits: DeviceLimits,
) -> ClusterPlan | None:
    """As `choose`, but None too where another way was measured to be faster."""
    if batch > most_sequences(cell, hidden, precision):
        return None
    return choose(cell, hidden, directions, batch, precision, limits)


@functools.cache
def choose(
    cell: Cell,
    hidden: int,
    directions: int,
    batch: int,
    precision: Precision,
    limits: DeviceLimits,
) -> ClusterPlan | None:
    """Return the plan that should be the fastest, or None where none fits the device."""
    narrow = precision is Precision.SPLIT or batch <= 4
    found = [
        plan
        for columns in ((4,) if narrow else (8, 4))
        if (plan := _with_columns(cell, hidden, directions, columns, precision, limits))
    ]

    def cost(plan: ClusterPlan) -> float:
        clusters = plan.clusters(batch)
        return forward_time(plan) * _waves(clusters, plan.forward_shape, limits) + (
            backward_time(plan) * _waves(clusters, plan.backward_shape, limits)
        )

    return min(found, key=cost, default=None)


def _waves(clusters: int, shape: Shape, limits: DeviceLimits) -> int:
    """Return how often the device must be filled to run so many clusters, a block at a time."""
    at_once = AT_ONCE.get(shape.cluster, limits.multiprocessors // shape.cluster)
    return -(-clusters // max(1, at_once))


def _with_columns(
    cell: Cell, hidden: int, directions: int, columns: int, precision: Precision,
    limits: DeviceLimits,
) -> ClusterPlan | None:  # fmt: skip
    """Return the plan with the best shapes of both passes, if there are any that fit."""

    def plan(forward: Shape, backward: Shape) -> ClusterPlan:
        return ClusterPlan(cell, hidden, directions, precision, columns, forward, backward)

    # Each pass is judged alone: the other's shape does not matter to it.
    forward = [
        shape
        for shape in forward_shapes(cell, hidden)
        if plan(shape, Shape(1, 16, 8)).fits_forward(limits)
    ]
    backward = [
        shape
        for shape in backward_shapes(hidden)
        if plan(Shape(1, 1, 16), shape).fits_backward(limits)
    ]
    if not forward or not backward:
        return None
    return plan(
        min(forward, key=lambda shape: forward_time(plan(shape, backward[0]))),
        min(backward, key=lambda shape: backward_time(plan(forward[0], shape))),
    )


def forward_shapes(cell: Cell, hidden: int) -> Iterator[Shape]:
    """Yield the shapes that forward may have, whether or not they fit."""
    tile = 16 if cell.gates == 1 else 4
    tiles = -(-hidden // tile)
    for cluster in CLUSTERS:
        for warps in WARPS:
            of_warp = -(-tiles // (cluster * warps))
            units = warps * of_warp * tile
            # Not more warps than there is work for, and whole vectors of h.
            spare = cluster * units - hidden
            if of_warp <= MOST_TILES and units * cluster % 8 == 0 and spare < max(units, 8):
                yield Shape(cluster, warps, units)


def backward_shapes(hidden: int) -> Iterator[Shape]:
    """Yield the shapes that backward may have, whether or not they fit."""
    for cluster in CLUSTERS:
        units = -(-hidden // (8 * cluster)) * 8
        if cluster * units - hidden >= units:
            continue  # blocks without units
        for warps in (4, 6, 8, 12, 16):
            yield Shape(cluster, warps, units)


def forward_time(plan: ClusterPlan) -> float:
    """Return an estimate of a step's nanoseconds."""
    shape, gates = plan.forward_shape, plan.cell.gates
    # LSTM reads or writes 11 values of a cell.
    weight = (gates + plan.cell.kept + 3) / 11 if gates > 1 else 3 / 11
    lines = weight * plan.columns * shape.warps * plan.forward_tiles
    chains = min(plan.forward_chunks, 4 if plan.forward_tiles == 1 else 2)
    chained = (6 if plan.precision is Precision.SPLIT else 2) * plan.forward_chunks / chains
    time = FORWARD + TILE_COLUMN * max(0, lines - FREE_TILE_COLUMNS)
    time += CHAINED * chained + UNIT * plan.hidden
    if plan.precision is Precision.HALF and plan.forward_tiles % 2 and gates > 1:
        time += SHORT_PIECE * plan.hidden / plan.tile_units * plan.columns
    return time


def backward_time(plan: ClusterPlan) -> float:
    """Return an estimate of a step's nanoseconds."""
    shape = plan.backward_shape
    cells = shape.units * plan.columns
    rounds = -(-cells // (32 * shape.warps))
    time = BACKWARD + CELL * max(0, cells - FREE_CELLS) + UNIT * plan.hidden
    return time + ROUND * (rounds - 1) + shape.warps  # no more warps than gain
