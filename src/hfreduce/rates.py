"""`hfreduce.benchmark()`: how fast a group's all-reduces are on this machine, by size."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hfreduce.reducer import Reducer

SIZES = tuple(4096 << shift for shift in range(0, 17, 2))  # 4 KiB to 256 MiB
_BYTES_A_ROUND = 16 << 20
_MOST_CALLS = 100


@dataclass(frozen=True)
class Rate:
    """All-reduces of one size.

    Attributes:
        nbytes: Of the tensor.
        seconds: Of one call, for the slowest rank: the median of the rounds, the least, the most.
    """

    nbytes: int
    seconds: tuple[float, float, float]

    def __str__(self) -> str:
        middle, least, most = (second * 1e6 for second in self.seconds)
        rate = self.nbytes / self.seconds[0] / 1e9
        size = f"{self.nbytes >> 10} KiB" if self.nbytes < 1 << 20 else f"{self.nbytes >> 20} MiB"
        return f"{size:>8} {middle:12.1f} µs ({least:.1f} to {most:.1f}) {rate:8.2f} GB/s"


def benchmark(
    reducer: Reducer,
    sizes: Sequence[int] = SIZES,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    rounds: int = 5,
) -> list[Rate]:
    """Time all-reduces; all ranks call it, and all get the same figures.

    Args:
        reducer: The group.
        sizes: Bytes.
        dtype: Of the tensors.
        device: Where they are.
        rounds: For each size; each is several calls where the size is small.
    """
    found = []
    on_gpu = torch.device(device).type == "cuda"
    for nbytes in sizes:
        tensor = torch.zeros(max(1, nbytes // dtype.itemsize), dtype=dtype, device=device)
        calls = max(1, min(_MOST_CALLS, _BYTES_A_ROUND // max(1, nbytes)))
        times = torch.empty(rounds, dtype=torch.float64)
        reducer.all_reduce(tensor)  # the first touches the memory
        for turn in range(rounds):
            if on_gpu:
                torch.cuda.synchronize(device)
            reducer.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                reducer.all_reduce(tensor)
            if on_gpu:
                torch.cuda.synchronize(device)
            times[turn] = (time.perf_counter() - start) / calls
        reducer.all_reduce(times, "max")
        every = times.tolist()
        found.append(Rate(nbytes, (statistics.median(every), min(every), max(every))))
    return found
