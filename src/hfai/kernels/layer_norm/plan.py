"""How a LayerNorm of a given row length and types is laid out on a device.

Everything here is decided by the row length, the types and the device, never by the number of
rows: that is what keeps a row's result the same, to the bit, whatever batch it stands in. The
numbers come from measurements on an H200; docs/kernels/layer_norm.md has the tables and what was
tried.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from hfai.kernels.jit import DeviceLimits

LONG_ROW_THREADS = 512
# Of weight, and of bias, that a thread asks for together with x; and the same where rows are few.
EARLY_BYTES = 64
FEW_ROWS_EARLY_BYTES = 256
FEW_ROWS_THREADS = 128  # up to here, threads that share a row where rows are few
# What a multiprocessor keeps for itself of each block's shared memory, and static arrays.
SHARED_BYTES_RESERVED = 4096


@dataclass(frozen=True)
class ForwardPlan:
    """Launch shape and compile-time constants of `forward.cu`."""

    vector: int
    lanes: int
    threads: int
    cluster: int
    groups: int
    blocks: int
    early_bytes: int
    hold_early: bool

    @property
    def rows_per_cluster(self) -> int:
        """Rows that one block, or one cluster of blocks, takes."""
        return 1 if self.groups > 1 else self.threads // self.lanes

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {name.upper(): value for name, value in asdict(self).items()}


@dataclass(frozen=True)
class BackwardPlan:
    """Launch shape and compile-time constants of `backward.cu`."""

    vector: int
    lanes: int
    threads: int
    cluster: int
    rows: int
    stages: int

    @property
    def rows_per_cluster(self) -> int:
        """Rows that one block, or one cluster of blocks, takes at a time."""
        return self.threads // self.lanes * self.rows

    def columns(self, row_length: int) -> int:
        """Columns that one thread holds."""
        return -(-row_length // (self.vector * self.lanes * self.cluster)) * self.vector

    def shared_bytes(self, row_length: int, x_bytes: int, y_bytes: int, weight_bytes: int) -> int:
        """Return the dynamic shared memory that `backward.cu` lays out, in bytes."""
        held = self.columns(row_length) * self.threads
        ring = self.stages * self.rows * held * (x_bytes + y_bytes)
        weights = held * weight_bytes if self.columns(row_length) * weight_bytes > 64 else 0
        slots = self.threads // self.lanes
        merge = 4 * slots * 2 * row_length if slots > 1 else 0  # dweight and dbias of each slot
        return max(ring + weights, merge)

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {name.upper(): value for name, value in asdict(self).items()}


def vector_length(row_length: int, *element_bytes: int) -> int:
    """Return the most elements that 16-byte accesses take and that divide the row."""
    length = 16 // max(element_bytes)
    while row_length % length:
        length //= 2
    return length


def strips(vector: int) -> int:
    """Return how many vectors of columns a thread of columns.cuh takes, for long rows."""
    return max(1, 2 // vector)


def forward_plan(
    row_length: int, x_bytes: int, y_bytes: int, limits: DeviceLimits, few_rows: bool = False
) -> ForwardPlan | None:
    """Lay out the forward pass; None where `long_rows.cu` takes it.

    Short rows belong to a part of a warp, two or three vectors a thread; longer ones to a warp,
    then to a block, with up to 64 elements a thread: many bytes in flight and short chains of sums.

    Args:
        row_length: elements in a row.
        x_bytes: size of an element of x.
        y_bytes: size of an element of y.
        limits: the device's.
        few_rows: whether the time of a single row counts. More threads then share a lane's vectors;
            which lane holds what of a row stays the same, and so do the bits of y.
    """
    vector = vector_length(row_length, x_bytes, y_bytes)
    lanes_and_more = _forward_lanes(row_length, vector, row_length * x_bytes, limits)
    if lanes_and_more is None:
        return None
    lanes, threads, cluster = lanes_and_more
    per_lane = -(-row_length // (vector * lanes * cluster))
    elements = per_lane * vector
    few_threads = (
        threads <= 128 and vector >= 4 and elements <= 32 and not (vector == 8 and lanes >= 128)
    )
    # Else the compiler saves registers for more blocks than help; 1024 threads would spill.
    blocks = 768 // threads if few_threads else threads // 1024
    many = ForwardPlan(vector, lanes, threads, cluster, 1, blocks, EARLY_BYTES, False)
    if not few_rows or cluster > 1 or threads > 256:
        return many
    groups = 1
    if elements >= 24 and 32 <= lanes < FEW_ROWS_THREADS:
        groups = min(_power_of_two_from(per_lane), FEW_ROWS_THREADS // lanes)
        groups = _power_of_two_from(groups + 1) // 2
    threads = 32 * -(-lanes * groups // 32)
    hold_early = vector == 8 or row_length * x_bytes <= 8192
    return ForwardPlan(vector, lanes, threads, 1, groups, 1, FEW_ROWS_EARLY_BYTES, hold_early)


def _forward_lanes(
    row_length: int, vector: int, row_bytes: int, limits: DeviceLimits
) -> tuple[int, int, int] | None:
    """Return lanes of a row, threads of a block and blocks of a cluster, for many rows."""
    vectors = row_length // vector
    if row_length > 32768 and row_bytes <= 2**17:
        return None  # half-precision rows that the L2 cache holds: two readings are faster
    if vectors <= 64:
        two, four = (max(1, min(32, _power_of_two_from(vectors) // share)) for share in (2, 4))
        fewer_idle = -(-vectors // four) * four < -(-vectors // two) * two
        return four if fewer_idle else two, 64, 1
    if row_bytes < 3072:
        return 32, 64, 1
    if vector == 8 and row_bytes <= 2**14:
        lanes = min(128, 32 * -(-vectors // 128))
        return lanes, lanes, 1
    if row_length <= 32768 and row_bytes <= 2**15:
        lanes = min(256, 32 * -(-vectors // (128 if vector == 8 else 64)))
        return lanes, lanes, 1
    if row_length <= 32768:
        lanes = max(256, _power_of_two_from(-(-row_length // 64)))
        return lanes, lanes, 1
    # 1024 threads spill a little; where elements are loaded one at a time that costs less than
    # twice the blocks.
    longest = 1024 if vector == 1 else 512
    lanes = 256 if row_length <= 65536 else longest
    cluster = _power_of_two_from(-(-row_length // (64 * lanes)))
    return None if cluster > limits.max_cluster else (lanes, lanes, cluster)


def backward_plan(
    row_length: int,
    x_bytes: int,
    y_bytes: int,
    weight_bytes: int,
    limits: DeviceLimits,
    asynchronous: bool = True,
    few_rows: bool = False,
) -> BackwardPlan | None:
    """Lay out the backward pass; None where `long_rows.cu` takes it.

    A warp or less takes a row of up to 1024 columns, and no barrier is needed; longer rows take a
    block, 8192 columns at most, and beyond that a cluster. About 64 KiB of rows are in flight on a
    multiprocessor, 128 KiB where a row takes the whole block.

    Args:
        row_length: elements in a row.
        x_bytes: size of an element of x and dx.
        y_bytes: size of an element of dy.
        weight_bytes: size of an element of the weight, 0 where there is none.
        limits: the device's.
        asynchronous: whether all tensors are aligned, so that `cp.async` may copy them.
        few_rows: whether a thread works on one row at a time, since there is no second. Which
            thread holds what of a row stays the same, and so do the bits of dx.
    """
    vector = vector_length(row_length, x_bytes, y_bytes)
    half = x_bytes + y_bytes <= 4
    asynchronous = asynchronous and vector * min(x_bytes, y_bytes) >= 4
    cluster = _power_of_two_from(-(-row_length // 8192))
    if cluster > limits.max_cluster:
        return None
    if row_length <= 1024:
        lanes = max(1, min(32, _power_of_two_from(row_length // 8 + 1) // 2))
        rows = 1
    else:
        columns = -(-row_length // cluster)
        most = 32 if columns <= 4096 or (half and cluster == 1) else 16
        lanes = 32 * -(-columns // (32 * most))
        rows = 2 if half or (columns > 4096 and cluster == 1) else 1
    slots = max(1, 256 // lanes)
    if few_rows or not asynchronous:  # without cp.async all rows at work are in registers
        rows = 1

    def fits(plan: BackwardPlan) -> bool:
        columns = 8 * vector * plan.threads if few_rows else 0  # columns.cuh: dweight and dbias
        room = limits.shared_bytes_per_block - SHARED_BYTES_RESERVED - columns
        return plan.shared_bytes(row_length, x_bytes, y_bytes, weight_bytes) <= room

    def in_flight(plan: BackwardPlan) -> int:
        return plan.rows_per_cluster * row_length // cluster * (x_bytes + y_bytes) * plan.stages

    plan = BackwardPlan(vector, lanes, lanes * slots, cluster, rows, 0)
    if asynchronous:
        one, two = (BackwardPlan(vector, lanes, lanes * slots, cluster, rows, s) for s in (1, 2))
        enough = 2**17 if -(-row_length // cluster) > 4096 else 2**16
        plan = one if (in_flight(one) >= enough and not half) or not fits(two) else two
        while not fits(plan) and plan.threads > lanes:
            plan = BackwardPlan(vector, lanes, plan.threads // 2 // lanes * lanes, cluster, rows, 1)
        if not fits(plan):
            plan = BackwardPlan(vector, lanes, lanes, cluster, 1, 1)
    return plan if fits(plan) else None


def _power_of_two_from(value: int) -> int:
    """Return the smallest power of two that is not below `value`."""
    return 1 << max(0, value - 1).bit_length()
