"""How the kernels are laid out: decided by row length and types alone, never by rows."""

from __future__ import annotations

from dataclasses import dataclass

# Elements of a row that one thread holds. In backward it holds three sums for each.
COLUMNS_OF_A_THREAD = 8
MOST_COLUMNS = 512 * COLUMNS_OF_A_THREAD
FORWARD_THREADS = 128
BACKWARD_THREADS = 384
MOST_SLOTS = 8
# Of a multiprocessor in backward: about 80 registers for each. With 64 it would spill a few.
THREADS_AT_WORK = 768


@dataclass(frozen=True)
class Plan:
    """Launch shape and compile-time constants of one kernel."""

    row_length: int
    vector: int
    lanes: int
    threads: int
    blocks: int
    """Of one multiprocessor, at least."""

    @property
    def slots(self) -> int:
        """Rows that a block takes at a time."""
        return self.threads // self.lanes

    def constants(self) -> dict[str, int | bool]:
        """Return what the sources take by these names."""
        return {
            "ROW_LENGTH": self.row_length,
            "VECTOR": self.vector,
            "LANES": self.lanes,
            "THREADS": self.threads,
        }

    def row_sum_bytes(self, count: int) -> int:
        """Return the shared memory of common.cuh's `RowSum` of so many sums, in whole pieces."""
        floats = 2 * self.slots * count * (self.lanes // 32) + 2 * count
        return -(-4 * floats // 16) * 16

    def forward_bytes(self) -> int:
        """Return the dynamic shared memory of forward.cu."""
        return self.row_sum_bytes(1) + self.row_sum_bytes(2)

    def backward_bytes(self) -> int:
        """Return the dynamic shared memory of backward.cu."""
        return max(self.row_sum_bytes(2), 4 * self.slots * self.row_length)


def covers(row_length: int) -> bool:
    """Return whether rows of this length have a plan."""
    return row_length % 8 == 0 and 0 < row_length <= MOST_COLUMNS


def forward_plan(row_length: int, widest: int) -> Plan:
    """Lay out the forward pass.

    Args:
        row_length: elements in a row; `covers` it.
        widest: bytes of an element of the widest type of branch, residual, sum and output.
    """
    vector, lanes = _lanes(row_length, widest)
    return Plan(row_length, vector, lanes, lanes * max(1, FORWARD_THREADS // lanes), 1)


def backward_plan(row_length: int, widest: int) -> Plan:
    """Lay out the backward pass; arguments as for `forward_plan`."""
    vector, lanes = _lanes(row_length, widest)
    threads = lanes * max(1, min(MOST_SLOTS, BACKWARD_THREADS // lanes))
    return Plan(row_length, vector, lanes, threads, max(1, THREADS_AT_WORK // threads))


def _lanes(row_length: int, widest: int) -> tuple[int, int]:
    vector = 16 // widest
    return vector, 32 * -(-row_length // (32 * COLUMNS_OF_A_THREAD))
