"""How a recurrent layer of few hidden units is laid out on clusters, and whether it fits one.

A cluster of blocks runs one direction for a few sequences, with the recurrent matrix in the
registers of its threads; what blocks hand each other goes through their shared memory
(cluster_forward.cu, cluster_backward.cu). The estimates of registers are checked against the
assembler's own figures in tests/kernels/rnn.
"""

from __future__ import annotations

from dataclasses import dataclass

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn.plan import SHARED_BYTES_RESERVED, Cell, Precision

NOT_PORTABLE = {"sm_90": 16, "sm_100": 16}
"""The largest cluster of architectures that have larger ones than all with clusters have."""
PLACES = 2
"""For what a step is sent: `PLACES` of arrivals.cuh, each with a barrier of 8 bytes."""
FORWARD_AT_ONCE = 4


@dataclass(frozen=True)
class Shape:
    """Of one pass: the blocks of a cluster, the warps of a block, the units of a block."""

    cluster: int
    warps: int
    units: int


@dataclass(frozen=True)
class ClusterPlan:
    """The launch shapes and compile-time constants of both passes."""

    cell: Cell
    hidden: int
    directions: int
    precision: Precision
    columns: int
    """Sequences of the batch that a cluster takes."""
    forward_shape: Shape
    backward_shape: Shape
    short_messages: bool = False
    """HALF only: backward's partial sums travel in half precision, half the bytes."""

    @property
    def width(self) -> int:
        """Elements of a row of `states`: as matrix products want them aligned."""
        return -(-self.hidden // 8) * 8

    @property
    def gate_pitch(self) -> int:
        """Elements of a row of gates, a multiple of 8 so that matrix products are aligned."""
        return -(-self.cell.kept * self.hidden // 8) * 8

    @property
    def where(self) -> str:
        """In words, for `hfai.explain`."""
        blocks = self.forward_shape.cluster
        return f" on clusters of {blocks} blocks" if blocks > 1 else " on single blocks"

    def clusters(self, batch: int) -> int:
        """Return the clusters that a batch of so many sequences makes."""
        return self.directions * -(-batch // self.columns)

    @property
    def sent_columns(self) -> int:
        """Columns of the right operand: SPLIT has each value in two parts."""
        return 2 * self.columns if self.precision == Precision.SPLIT else self.columns

    @property
    def forward_tiles(self) -> int:
        """Tiles of 16 rows that a warp of forward owns."""
        return self.forward_shape.units // (self.forward_shape.warps * self.tile_units)

    @property
    def tile_units(self) -> int:
        """Units of a tile of 16 rows in forward."""
        return 16 if self.cell.gates == 1 else 4

    @property
    def backward_tiles(self) -> int:
        """Tiles of 16 rows that a warp of backward owns."""
        shape = self.backward_shape
        return -(-shape.units * shape.cluster // (16 * shape.warps))

    @property
    def forward_shared_bytes(self) -> int:
        """Dynamic shared memory of cluster_forward.cu."""
        return PLACES * (4 * self.forward_chunks * self._vector_pitch + 8)

    @property
    def backward_shared_bytes(self) -> int:
        """Dynamic shared memory of cluster_backward.cu."""
        shape = self.backward_shape
        messages = 4 * shape.cluster * shape.units * self.columns
        if self.short_messages:
            messages //= 2
        return PLACES * (messages + 4 * self.backward_chunks * self._vector_pitch + 8)

    @property
    def forward_registers(self) -> int:
        """An estimate of cluster_forward.cu's registers a thread."""
        tiles, chunks = self.forward_tiles, self.forward_chunks
        cells = 4 if self.cell.gates == 1 else 1
        matrix = tiles * chunks * self._fragment_registers
        loads = 4 * min(chunks, 2 * FORWARD_AT_ONCE)
        sums = 4 * tiles * min(chunks, 4 if tiles == 1 else 2)
        beside = tiles * (cells * (2 + self.cell.gates) + 2 * self.cell.gates)
        return matrix + loads + sums + beside + 30

    @property
    def backward_registers(self) -> int:
        """An estimate of cluster_backward.cu's registers a thread."""
        chunks, shape = self.backward_chunks, self.backward_shape
        matrix = self.backward_tiles * chunks * self._fragment_registers
        items = -(-shape.units * self.columns // (32 * shape.warps))
        beside = items * (2 * self.cell.kept + 10)
        return matrix + beside + max(5 * chunks + 8, items * shape.cluster) + 44

    def fits_forward(self, limits: DeviceLimits) -> bool:
        """Whether forward's cluster can run on such a device."""
        return _fits(limits, self.forward_shape, self.forward_registers, self.forward_shared_bytes)

    def fits_backward(self, limits: DeviceLimits) -> bool:
        """Whether backward's cluster can run on such a device."""
        return _fits(
            limits, self.backward_shape, self.backward_registers, self.backward_shared_bytes
        )

    def constants(self, *, forward: bool) -> dict[str, int | bool]:
        """Return what the sources take by these names."""
        shape = self.forward_shape if forward else self.backward_shape
        return {
            "CELL": int(self.cell),
            "HIDDEN": self.hidden,
            "DIRECTIONS": self.directions,
            "PRECISION": int(self.precision),
            "CLUSTER": shape.cluster,
            "UNITS": shape.units,
            "COLUMNS": self.columns,
            "WARPS": shape.warps,
            "WIDE_REST": True,
            "IN_SHARED": 0,
            "GATE_PITCH": self.gate_pitch,
            "STATE_WIDTH": self.width,
            **(
                {
                    "M_TILES": self.forward_tiles,
                    "AT_ONCE": min(self.forward_chunks, FORWARD_AT_ONCE),
                }
                if forward
                else {"SHORT_MESSAGES": self.short_messages}
            ),
        }

    @property
    def _chunk(self) -> int:
        return 32 if self.precision == Precision.HALF else 16

    @property
    def forward_chunks(self) -> int:
        """Chunks of the summed dimension in forward: all of h."""
        return -(-self.hidden // self._chunk)

    @property
    def backward_chunks(self) -> int:
        """Chunks of the summed dimension in backward: a block's own rows."""
        return -(-self.cell.gates * self.backward_shape.units // self._chunk)

    @property
    def _vector_pitch(self) -> int:
        """Bytes from a vector of all columns to the next one."""
        return 16 * self.sent_columns + 32

    @property
    def _fragment_registers(self) -> int:
        """Registers that 16 rows of one chunk take."""
        return 16 if self.precision == Precision.SPLIT else 8


def most_registers(warps: int) -> int:
    """Return what a thread may have: a multiprocessor has 65 536, given out by the eight."""
    return min(255, 65536 // (32 * warps) // 8 * 8)


def _fits(limits: DeviceLimits, shape: Shape, registers: int, shared_bytes: int) -> bool:
    most = NOT_PORTABLE.get(limits.architecture, limits.max_cluster)
    return (
        limits.max_cluster > 1
        and shape.cluster <= most
        and shared_bytes <= limits.shared_bytes_per_block - SHARED_BYTES_RESERVED
        and registers <= most_registers(shape.warps)
    )
