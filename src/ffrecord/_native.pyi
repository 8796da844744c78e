from typing import Any

import numpy as np
from numpy.typing import NDArray

LEAST_ARENA: int

def read_batch(
    keys: NDArray[Any],
    offsets: NDArray[Any],
    lengths: NDArray[Any],
    positions: NDArray[Any],
    arena: NDArray[Any],
    checksums: NDArray[Any],
    check: bool,
    way: str,
    direct: bool,
    cached_first: bool,
    threads: int,
) -> tuple[int, int]: ...
def probe(way: str, descriptor: int) -> int: ...
def empty(size: int) -> NDArray[np.uint8]: ...
def idle_bytes() -> int: ...
def crc32(data: bytes, way: str = "") -> int: ...
def crc32_ways() -> list[str]: ...
