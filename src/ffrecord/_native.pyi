from typing import Any

from numpy.typing import NDArray

def read_batch(
    keys: NDArray[Any],
    offsets: NDArray[Any],
    lengths: NDArray[Any],
    positions: NDArray[Any],
    arena: NDArray[Any],
    checksums: NDArray[Any],
    check: bool,
    ring: bool,
    direct: bool,
) -> tuple[int, int]: ...
def probe_ring(descriptor: int) -> int: ...
def crc32(data: bytes, by_table: bool = False) -> int: ...
def has_carryless_multiplication() -> bool: ...
