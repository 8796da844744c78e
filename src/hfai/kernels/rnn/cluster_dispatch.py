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

# Cycles, on one multiprocessor: of a trip to another's shared memory, of a product of a warp that
# has a quarter of the multiprocessor for itself, of one that waits for another's sum, of a lane's
# cells of one tile; and bytes a cycle that reach its shared memory, and its own warps from it.
TRIP = 250
PRODUCT = 8
CHAINED_PRODUCT = 33
CELLS = 60
RECEIVED_BYTES = {1: 64, 2: 13, 4: 13, 8: 13, 16: 6}  # by the blocks of a cluster
READ_BYTES = 128


# Up to how many hidden units (ascending), the largest batch with which clusters were measured to be
# faster than the other kernels and than cuDNN.
FASTER: dict[Precision, dict[Cell, tuple[tuple[int, int], ...]]] = {
    precision: dict.fromkeys(Cell, ()) for precision in Precision
}


def most_sequences(cell: Cell, hidden: int, precision: Precision) -> int:
    """Return the largest batch that clusters take."""
    for units, sequences in FASTER[precision][cell]:
        if hidden <= units:
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
        return forward_cycles(plan) * _waves(clusters, plan.forward_shape, limits) + (
            backward_cycles(plan) * _waves(clusters, plan.backward_shape, limits)
        )

    return min(found, key=cost, default=None)


def _waves(clusters: int, shape: Shape, limits: DeviceLimits) -> int:
    """Return how often the device must be filled to run so many clusters, a block at a time."""
    return -(-clusters // max(1, limits.multiprocessors // shape.cluster))


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
        min(forward, key=lambda shape: forward_cycles(plan(shape, backward[0]))),
        min(backward, key=lambda shape: backward_cycles(plan(forward[0], shape))),
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


def forward_cycles(plan: ClusterPlan) -> float:
    """Return an estimate of the cycles of a step."""
    shape, chunks = plan.forward_shape, plan.forward_chunks
    per_chunk = 3 if plan.precision is Precision.SPLIT else 1
    products = 2 * per_chunk * chunks * plan.forward_tiles * max(1, shape.warps / 4) * PRODUCT
    chained = 2 * per_chunk * chunks / min(chunks, 4 if plan.forward_tiles == 1 else 2)
    row = 64 * chunks * plan.sent_columns  # bytes of h
    read = shape.warps * row / READ_BYTES
    cells = CELLS * plan.forward_tiles * (4 if plan.cell.gates == 1 else 1)
    cycles = max(products, chained * CHAINED_PRODUCT) + read + cells
    return cycles + (TRIP if shape.cluster > 1 else 0) + row / RECEIVED_BYTES[shape.cluster]


def backward_cycles(plan: ClusterPlan) -> float:
    """Return an estimate of the cycles of a step."""
    shape, chunks = plan.backward_shape, plan.backward_chunks
    per_chunk = 3 if plan.precision is Precision.SPLIT else 1
    items = -(-shape.units * plan.columns // (32 * shape.warps))
    work = 2 * per_chunk * chunks * plan.backward_tiles
    products = work * max(1, shape.warps / 4) * PRODUCT
    chained = per_chunk * chunks * CHAINED_PRODUCT
    read = shape.warps * 64 * chunks * plan.sent_columns / READ_BYTES
    cells = items * (CELLS + 4 * shape.cluster)
    sent = 4 * shape.units * shape.cluster * plan.columns
    cycles = max(products, chained) + read + cells
    return cycles + (TRIP if shape.cluster > 1 else 0) + sent / RECEIVED_BYTES[shape.cluster]
