"""A shuffled order that is computed, not stored.

A number is split into a quotient below ⌈√n⌉ and a remainder, and sent through a Feistel network:
each round adds a keyed hash of one half to the other, modulo that half's size. A round can be
undone, so the whole is a permutation of all pairs. The few pairs that stand for n and beyond are
sent through again until they land below n (cycle walking), which leaves a permutation of 0 to
n - 1. Any place in it costs the same, the middle of 10⁹ records too.
"""

from __future__ import annotations

import hashlib
import math
import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 8


class Permutation:
    """A permutation of 0 to n - 1, chosen by a seed and an epoch.

    The same arguments give the same order on every machine and in every version.

    Args:
        n: How many numbers, 1 to 2⁶² - 1.
        seed: Any integer of 64 bits, signed.
        epoch: Likewise; each gives another order.
    """

    def __init__(self, n: int, seed: int, epoch: int = 0) -> None:
        if not 1 <= n < 1 << 62:
            raise ValueError(f"n is {n}: give 1 to 2**62 - 1")
        self.n = n
        high = math.isqrt(n - 1) + 1
        self._high = np.uint64(high)
        self._low = np.uint64(-(-n // high))
        key = struct.pack("<qqq", n, seed, epoch)
        digest = hashlib.blake2b(key, digest_size=8 * _ROUNDS, person=b"ffrecord order 1").digest()
        self._keys = np.frombuffer(digest, "<u8").astype(np.uint64)

    def __call__(self, positions: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the numbers at some positions, each in [0, n): int64, the same shape (k,)."""
        found = self._once(np.asarray(positions).astype(np.uint64))
        n = np.uint64(self.n)
        while len(beyond := np.flatnonzero(found >= n)):
            found[beyond] = self._once(found[beyond])
        return found.astype(np.int64)

    def _once(self, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = np.divmod(numbers, self._low)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = (right + _hash(left ^ key) % self._low) % self._low
            else:
                left = (left + _hash(right ^ key) % self._high) % self._high
        return np.asarray(left * self._low + right)


def _hash(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix 64 bits: the output function of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(words ^ (words >> np.uint64(31)))
