"""How a LayerNorm of a given row length and types is laid out on a device.

Everything here is decided by the row length, the types and the device, never by the number of
rows: that is what keeps a row's result the same, to the bit, whatever batch it stands in. The
numbers were chosen by measurement; docs/kernels/layer_norm.md has the tables.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfai.kernels.jit import DeviceLimits

# Elements of a row that one thread keeps in registers in the forward pass.
FORWARD_ELEMENTS = 32
# Columns whose dweight and dbias one thread keeps in registers in the backward pass.
BACKWARD_COLUMNS = 8
BACKWARD_COLUMNS_OF_LARGE_BLOCKS = 16
LARGE_BLOCK = 512
LONG_ROW_THREADS = 512


@dataclass(frozen=True)
class ForwardPlan:
    """Launch shape and compile-time constants of `forward.cu`."""

    vector: int
    lanes: int
    threads: int
    cluster: int
    rows: int

    @property
    def rows_per_cluster(self) -> int:
        """Rows that one block, or one cluster of blocks, takes."""
        return self.threads // self.lanes * self.rows

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "VECTOR": self.vector,
            "LANES": self.lanes,
            "THREADS": self.threads,
            "CLUSTER": self.cluster,
            "ROWS": self.rows,
        }


@dataclass(frozen=True)
class BackwardPlan:
    """Launch shape and compile-time constants of `backward.cu`."""

    vector: int
    lanes: int
    threads: int
    cluster: int
    rows: int
    stages: int
    blocks_per_multiprocessor: int
    shared_bytes: int

    @property
    def rows_per_cluster(self) -> int:
        """Rows that one block, or one cluster of blocks, takes at a time."""
        return self.threads // self.lanes * self.rows

    def constants(self) -> dict[str, int | bool]:
        """Return what the source takes by these names."""
        return {
            "VECTOR": self.vector,
            "LANES": self.lanes,
            "THREADS": self.threads,
            "CLUSTER": self.cluster,
            "ROWS": self.rows,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks_per_multiprocessor,
        }


def vector_length(row_length: int, *element_bytes: int) -> int:
    """Return the most elements that 16-byte accesses take and that divide the row."""
    length = 16 // max(element_bytes)
    while row_length % length:
        length //= 2
    return length


def forward_plan(
    row_length: int, x_bytes: int, y_bytes: int, limits: DeviceLimits
) -> ForwardPlan | None:
    """Lay out the forward pass; None where a row does not fit in registers (`long_rows.cu`)."""
    vector = vector_length(row_length, x_bytes, y_bytes)
    vectors = row_length // vector
    most = FORWARD_ELEMENTS // vector
    lanes = min(32, _next_power_of_two(vectors))
    cluster = 1
    while -(-vectors // (lanes * cluster)) > most:
        if lanes < 1024:
            lanes *= 2
        elif cluster < limits.max_cluster:
            cluster *= 2
        else:
            return None
    per_lane = -(-vectors // (lanes * cluster))
    # Short rows: several a thread, so that enough loads are in flight.
    rows = max(1, 4 // per_lane) if lanes <= 32 else 1
    return ForwardPlan(vector, lanes, max(lanes, 128), cluster, rows)


def backward_plan(
    row_length: int,
    x_bytes: int,
    y_bytes: int,
    weight_bytes: int,
    limits: DeviceLimits,
    asynchronous: bool = True,
) -> BackwardPlan | None:
    """Lay out the backward pass; None where a row does not fit on the chip (`long_rows.cu`).

    Args:
        row_length: elements in a row.
        x_bytes: size of an element of x and dx.
        y_bytes: size of an element of dy.
        weight_bytes: size of an element of the weight, 0 where there is none.
        limits: the device's.
        asynchronous: whether all tensors are aligned, so that `cp.async` may copy them.
    """
    vector = vector_length(row_length, x_bytes, y_bytes)
    vectors = row_length // vector
    asynchronous = asynchronous and vector * min(x_bytes, y_bytes) >= 4
    cluster = 1
    while cluster * BACKWARD_COLUMNS_OF_LARGE_BLOCKS * LARGE_BLOCK < row_length:
        cluster *= 2
    if cluster > limits.max_cluster:
        return None
    lanes = _backward_lanes(vectors, vector, cluster)
    per_lane = -(-vectors // (lanes * cluster))
    slots = max(1, 256 // lanes)
    threads = lanes * slots
    blocks = max(1, 1024 // threads) if threads < LARGE_BLOCK else 1
    per_thread = per_lane * vector
    stage = per_thread * threads * (x_bytes + y_bytes)
    weights = per_thread * threads * weight_bytes if per_thread * weight_bytes > 64 else 0
    merge = 4 * slots * row_length if slots > 1 else 0
    room = (limits.shared_bytes_per_block - 1024) // blocks - 1024
    stages = 0
    if asynchronous:
        stages = min(6, (room - weights) // stage)
        if stages < 1:
            return None
    shared = max(stages * stage + weights, merge)
    return BackwardPlan(vector, lanes, threads, cluster, 1, stages, blocks, shared)


def _backward_lanes(vectors: int, vector: int, cluster: int) -> int:
    """Choose threads a row: few idle ones, few columns each."""
    mine = -(-vectors // cluster)
    columns = BACKWARD_COLUMNS
    if -(-mine // max(1, columns // vector)) > LARGE_BLOCK:
        columns = BACKWARD_COLUMNS_OF_LARGE_BLOCKS
    per_lane = max(1, columns // vector)
    wanted = -(-mine // per_lane)
    if wanted > 32:
        return -(-wanted // 32) * 32
    return _next_power_of_two(wanted)


def _next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()
