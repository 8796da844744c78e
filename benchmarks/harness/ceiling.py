"""The two ceilings, measured at the start of each run, and the floor that they give a call.

No call is much faster than its bytes over the copy bandwidth, or than its operations over the rate
of the unit that does them; the larger of the two times is the floor.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise

import torch

from benchmarks.harness.case import Work
from benchmarks.harness.timing import device_event, elapsed_ms

COPY_BYTES = {"cuda": 2 << 30, "cpu": 128 << 20}
PRODUCT_SIZE = {"cuda": 8192, "cpu": 1024}
# unit -> operand type of the matrix product that measures it, and whether TF32 is allowed in it
UNITS = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "fp16": (torch.float16, False),
    "bf16": (torch.bfloat16, False),
}


@dataclass(frozen=True)
class Ceilings:
    """What the machine does at best.

    Attributes:
        bytes_per_second: of a large copy on the device, bytes read plus bytes written.
        operations_per_second: of a large square matrix product, by unit.
    """

    bytes_per_second: float
    operations_per_second: Mapping[str, float]

    def floor_ms(self, work: Work) -> float:
        """Return the least time of a call that does `work`."""
        moving = work.bytes / self.bytes_per_second
        computing = work.operations / self.operations_per_second[work.unit]
        return 1e3 * max(moving, computing)


def measure_ceilings(device: torch.device, units: set[str]) -> Ceilings:
    """Measure the copy bandwidth and the rates of the named `UNITS`; a second or two at most."""
    rates = {unit: _product_rate(device, unit) for unit in sorted(units)}
    ceilings = Ceilings(_copy_rate(device), rates)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # gigabytes that the first case may need
    return ceilings


def _copy_rate(device: torch.device) -> float:
    size = COPY_BYTES[device.type]
    if device.type == "cuda":
        size = min(size, torch.cuda.mem_get_info(device)[0] // 8)
    source = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / _median_seconds(lambda: target.copy_(source), device)


def _product_rate(device: torch.device, unit: str) -> float:
    dtype, tf32 = UNITS[unit]
    size = PRODUCT_SIZE[device.type]
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    switch = torch.backends.cuda.matmul
    before = switch.allow_tf32
    switch.allow_tf32 = tf32
    try:
        return float(2 * size**3 / _median_seconds(lambda: torch.mm(a, b, out=out), device))
    finally:
        switch.allow_tf32 = before


def _median_seconds(call: Callable[[], object], device: torch.device, samples: int = 9) -> float:
    """Return the median time of a call that keeps the device busy for a good while."""
    for _ in range(2):
        call()
    if device.type != "cuda":
        durations = []
        for _ in range(samples):
            begin = time.perf_counter()
            call()
            durations.append(time.perf_counter() - begin)
        return statistics.median(durations)
    marks = [device_event() for _ in range(samples + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(elapsed_ms(*pair) * 1e-3 for pair in pairwise(marks))
