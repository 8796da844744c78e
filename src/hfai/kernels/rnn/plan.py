"""How a recurrent layer is laid out on a device: who owns which units, and whether it fits at all.

A group of blocks runs one direction for a slice of the batch, all its steps in one launch, with the
recurrent matrix in registers. What decides is how many registers a thread needs for its share of
the matrix, and how many blocks the device runs at once. None of it depends on the number of steps.
The estimates are checked against the assembler's own figures in tests/kernels/rnn.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from hfai.kernels.jit import DeviceLimits

SHARED_BYTES_RESERVED = 512
MOST_AT_ONCE_OF_TILES = 8
SPARE_REGISTERS = 24
"""Left to the compiler where fragments have moved to shared memory: the estimates are tight."""
SPARE_REGISTERS_OF_SPLIT = 5
"""Its fragments are larger: one more than this asks for took longer than a few words spilled."""
MOST_REGISTERS = {8: 255, 16: 128}
"""Of a thread, by the warps of a block: a multiprocessor has 65 536."""
MOST_ESTIMATED = {8: 255, 16: 138}
"""Estimates up to which plans were seen not to spill, or by a few words that nobody waits for."""


class Cell(enum.IntEnum):
    """Which recurrence; the values are those of cells.cuh."""

    LSTM = 0
    GRU = 1
    RNN_TANH = 2
    RNN_RELU = 3

    @property
    def gates(self) -> int:
        """Rows of the weights for each hidden unit."""
        return (4, 3, 1, 1)[self.value]

    @property
    def kept(self) -> int:
        """Values for each hidden unit and step in the gates' buffer; at least `gates`."""
        return (4, 4, 1, 1)[self.value]

    @property
    def has_c(self) -> bool:
        """Whether there is a cell state beside h."""
        return self is Cell.LSTM


class Precision(enum.IntEnum):
    """How products are made; the values are those of fragments.cuh."""

    TF32 = 0
    SPLIT = 1
    """fp32's own accuracy, on tensor cores in three parts."""
    HALF = 2


@dataclass(frozen=True)
class Plan:
    """The launch shape and compile-time constants of forward.cu and backward.cu."""

    cell: Cell
    hidden: int
    directions: int
    precision: Precision
    units: int
    """Hidden units that a block owns."""
    columns: int
    """Sequences that one tile of the tensor cores' products takes."""
    tiles: int
    """Tiles that a group of blocks takes."""
    forward_warps: int
    backward_warps: int
    wide_rest: bool = False
    """SPLIT only: the weights' rest is kept in TF32 and not in bf16."""
    most_at_once: int = 4
    """Bound on `forward_at_once` with one tile: looks that fail cost everybody bandwidth."""
    forward_look_after: int = 0
    """Cycles after sending that a block waits before it first looks for what others sent."""
    backward_look_after: int = 0
    short_messages: bool = False
    """HALF only: backward's partial sums travel in half precision, half the bytes."""

    @property
    def where(self) -> str:
        """In words, for `hfai.explain`."""
        return ""

    @property
    def blocks(self) -> int:
        """Blocks of a group."""
        return -(-self.hidden // self.units)

    @property
    def width(self) -> int:
        """Elements of a row of h: all blocks' units."""
        return self.blocks * self.units

    @property
    def gate_pitch(self) -> int:
        """Elements of a row of gates, a multiple of 8 so that matrix products are aligned."""
        return -(-self.cell.kept * self.hidden // 8) * 8

    @property
    def sequences(self) -> int:
        """Sequences of the batch that a group takes."""
        return self.tiles * self.columns

    @property
    def cells(self) -> int:
        """Cells of one tile in a block: values of one message between two blocks in backward."""
        return self.units * self.columns

    @property
    def sent_columns(self) -> int:
        """Columns of the right operand that a tile makes: SPLIT has each value in two parts."""
        return 2 * self.columns if self.precision == Precision.SPLIT else self.columns

    @property
    def eights(self) -> int:
        """Products, of 8 columns each, that a fragment of the matrix makes for a tile."""
        return -(-self.sent_columns // 8)

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 rows that a block's share of the recurrent matrix makes."""
        return -(-self.cell.gates * self.units // 16)

    def groups(self, batch: int) -> int:
        """Return the groups that a batch of so many sequences makes."""
        return self.directions * -(-batch // self.sequences)

    def mailbox_floats(self, groups: int) -> int:
        """Return the size of backward's `mailbox` for so many groups, in words of 4 bytes."""
        values = 2 * groups * self.tiles * self.blocks**2 * self.cells
        return values // (2 if self.short_messages else 1)

    def exchange_elements(self, steps: int, batch: int) -> int:
        """Return the size of forward's `exchange`."""
        tiles = -(-batch // self.columns)
        rows = self.directions * (steps + 1) * tiles * self.sent_columns
        return rows * self.width

    @property
    def forward_shared_bytes(self) -> int:
        """Dynamic shared memory of forward.cu."""
        rows = 16 * self.row_tiles + 4
        sums = 4 * 2 * self.forward_warps * 8 * self.eights * rows
        items = -(-self.cells * self._lanes_of_cell // (32 * self.forward_warps))
        carried = 4 * self.tiles * 2 * items * 32 * self.forward_warps if self.tiles > 1 else 0
        return (
            16 + sums + carried + self._fragment_bytes(self.forward_warps) * self.forward_in_shared
        )

    @property
    def backward_shared_bytes(self) -> int:
        """Dynamic shared memory of backward.cu."""
        vectors = self.cells // (8 if self.short_messages else 4)
        partials = 32 * self.backward_warps // max(32, vectors)
        chunks = self._backward_chunks
        pitch = chunks * 16 + (16 if chunks % 2 == 0 else 0)
        sums = self.cells + self.cells // 32 * 4
        exchanged = 4 * (partials * sums + 8 * self.eights * pitch + 4)
        return exchanged + self._fragment_bytes(self.backward_warps) * self.backward_in_shared

    @property
    def forward_in_shared(self) -> int:
        """Fragments of a warp's share of the matrix in shared memory: what has no registers."""
        return self._in_shared(
            self._forward_fragments, self._forward_registers_beside, self.forward_warps
        )

    @property
    def backward_in_shared(self) -> int:
        """As `forward_in_shared`, of backward.cu."""
        fragments, beside = self._backward_fragments, self._backward_registers_beside
        in_shared = self._in_shared(fragments, beside, self.backward_warps)
        # SPLIT spills where the estimate has less than a fragment to spare: LSTM 985 took 2.71 us a
        # step with all of them in registers, 2.27 with one in shared memory.
        room = MOST_ESTIMATED[self.backward_warps] - fragments * self._fragment_registers - beside
        is_full = self.precision == Precision.SPLIT and room < self._fragment_registers
        return max(in_shared, 1) if is_full else in_shared

    @property
    def forward_registers(self) -> int:
        """An estimate of forward.cu's registers a thread."""
        resident = self._forward_fragments - self.forward_in_shared
        return resident * self._fragment_registers + self._forward_registers_beside

    @property
    def backward_registers(self) -> int:
        """An estimate of backward.cu's registers a thread."""
        resident = self._backward_fragments - self.backward_in_shared
        return resident * self._fragment_registers + self._backward_registers_beside

    @property
    def forward_at_once(self) -> int:
        """Chunks of h that a thread of forward.cu asks for before it looks at the first."""
        most = self.most_at_once if self.tiles == 1 else MOST_AT_ONCE_OF_TILES
        return min(self._forward_chunks, max(1, most // self.eights))

    def fits(self, limits: DeviceLimits) -> bool:
        """Whether a group can run on such a device."""
        room = limits.shared_bytes_per_block - SHARED_BYTES_RESERVED
        threads = 32 * self.backward_warps
        return (
            self.blocks <= limits.multiprocessors
            and self.cells // 4 <= threads
            and self.forward_shared_bytes <= room
            and self.backward_shared_bytes <= room
            and self.forward_registers <= MOST_ESTIMATED[self.forward_warps]
            and self.backward_registers <= MOST_ESTIMATED[self.backward_warps]
        )

    def constants(self, *, forward: bool) -> dict[str, int | bool]:
        """Return what the sources take by these names."""
        return {
            "CELL": int(self.cell),
            "HIDDEN": self.hidden,
            "DIRECTIONS": self.directions,
            "PRECISION": int(self.precision),
            "UNITS": self.units,
            "BLOCKS": self.blocks,
            "COLUMNS": self.columns,
            "TILES": self.tiles,
            "WIDE_REST": self.wide_rest,
            "LOOK_AFTER": self.forward_look_after if forward else self.backward_look_after,
            **(
                {"AT_ONCE": self.forward_at_once}
                if forward
                else {"SHORT_MESSAGES": self.short_messages}
            ),
            "IN_SHARED": self.forward_in_shared if forward else self.backward_in_shared,
            "WARPS": self.forward_warps if forward else self.backward_warps,
            "GATE_PITCH": self.gate_pitch,
        }

    @property
    def _lanes_of_cell(self) -> int:
        """Lanes that share a cell in forward.cu."""
        return 4 if self.cell.gates > 1 else 1

    @property
    def _chunk(self) -> int:
        return 32 if self.precision == Precision.HALF else 16

    @property
    def _forward_chunks(self) -> int:
        return -(-self.width // (self._chunk * self.forward_warps))

    @property
    def _backward_chunks(self) -> int:
        return -(-self.cell.gates * self.units // self._chunk)

    @property
    def _forward_fragments(self) -> int:
        return self.row_tiles * self._forward_chunks

    @property
    def _backward_fragments(self) -> int:
        return -(-self.width // (16 * self.backward_warps)) * self._backward_chunks

    @property
    def _forward_registers_beside(self) -> int:
        """What forward.cu needs beside the matrix."""
        items = -(-self.cells * self._lanes_of_cell // (32 * self.forward_warps))
        buffers = 1 if self.precision == Precision.SPLIT else 2
        # With one buffer the second half comes as the first is multiplied: seen to spill six words.
        loads = min(self._forward_chunks, buffers * self.forward_at_once, 8 // (3 - buffers))
        each = 5 if self.tiles == 1 else 4  # several tiles carry in shared memory
        chains = max(2, self.eights)
        return 4 * loads * self.eights + 4 * chains * self.row_tiles + each * items + 24

    @property
    def _backward_registers_beside(self) -> int:
        """What backward.cu needs beside the matrix."""
        items = -(-self.cells // (32 * self.backward_warps))
        if self.tiles == 1:
            return 16 + (self.cell.kept + 5) * items + 28
        # The next tile's values and partial sums are on their way during the products.
        vectors = self.cells // (8 if self.short_messages else 4)
        words = 4 * min(8, -(-self.blocks * vectors // (32 * self.backward_warps)))
        return 16 + 2 * (self.cell.kept + 3) * items + words + 28

    def _in_shared(self, fragments: int, beside: int, warps: int) -> int:
        lacking = fragments * self._fragment_registers + beside - MOST_ESTIMATED[warps]
        if lacking <= 0:
            return 0
        # One that is read from there needs registers too, for a while.
        least = SPARE_REGISTERS_OF_SPLIT if self.precision == Precision.SPLIT else SPARE_REGISTERS
        spare = least + self._fragment_registers
        return min(fragments, -(-(lacking + spare) // self._fragment_registers))

    def _fragment_bytes(self, warps: int) -> int:
        """Shared memory of one fragment of every warp."""
        return 4 * self._fragment_registers * 32 * warps

    @property
    def _fragment_registers(self) -> int:
        """Registers that 16 rows of one chunk take."""
        if self.precision == Precision.SPLIT:
            return 16 if self.wide_rest else 12
        return 8
