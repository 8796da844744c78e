"""Samples, their summary, and the order in which they are taken.

Implementations are measured in turns, one sample of each a round and each round starting with
another, so that a change of clock or a busy neighbour hits all of them alike.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

SampleT = TypeVar("SampleT")

# A block of whole calls is at least this long, so that the clock and the synchronisation at its
# end are lost in it.
BLOCK_SECONDS = 0.01
MOST_CALLS_A_BLOCK = 1000


@dataclass(frozen=True)
class Summary:
    """Median and quartiles of the samples, in milliseconds a call."""

    median_ms: float
    lower_quartile_ms: float
    upper_quartile_ms: float
    samples: int
    method: str


def summarise(samples_ms: Sequence[float], method: str) -> Summary:
    """Summarise at least one sample.

    Args:
        samples_ms: milliseconds a call.
        method: how they were taken: "graph", "events" or "wall".
    """
    if len(samples_ms) == 1:
        lower = upper = samples_ms[0]
    else:
        lower, _, upper = statistics.quantiles(samples_ms, n=4, method="inclusive")
    return Summary(statistics.median(samples_ms), lower, upper, len(samples_ms), method)


def interleave(
    timers: Mapping[str, Callable[[], SampleT]], rounds: int
) -> dict[str, list[SampleT]]:
    """Take one sample of each timer a round, starting each round with the next timer."""
    names = list(timers)
    samples: dict[str, list[SampleT]] = {name: [] for name in names}
    with no_collection():
        for turn in range(rounds):
            first = turn % len(names) if names else 0
            for name in names[first:] + names[:first]:
                samples[name].append(timers[name]())
    return samples


def rounds_within(budget_s: float, round_s: float, least: int, most: int) -> int:
    """Return how many rounds fit the budget, within bounds."""
    if round_s <= 0:
        return most
    return max(least, min(most, int(budget_s / round_s)))


def wall_times(
    calls: Mapping[str, Sequence[Callable[[], object]]],
    synchronize: Callable[[], None],
    budget_s: float,
    least: int = 3,
    most: int = 30,
) -> dict[str, Summary]:
    """Time whole calls as the host's clock sees them: blocks of calls, synchronised at the end.

    On small inputs the device keeps up and this is the host's cost; on large ones it is the
    device's.

    Args:
        calls: for each name, the same call on several input sets, taken in turn.
        synchronize: waits until the device has done what was asked of it.
        budget_s: about how long all this may take.
        least: the fewest blocks of each.
        most: the most blocks of each.
    """
    timers = {name: _block_timer(rotation, synchronize) for name, rotation in calls.items()}
    begin = time.perf_counter()
    for timer in timers.values():
        timer()
    rounds = rounds_within(budget_s, time.perf_counter() - begin, least, most)
    return {
        name: summarise(samples, "wall") for name, samples in interleave(timers, rounds).items()
    }


def _block_timer(
    rotation: Sequence[Callable[[], object]], synchronize: Callable[[], None]
) -> Callable[[], float]:
    """Return a timer of one block, its length fitted to how long a call takes."""

    def block(count: int) -> float:
        sequence = [rotation[i % len(rotation)] for i in range(count)]
        synchronize()
        begin = time.perf_counter()
        for call in sequence:
            call()
        synchronize()
        return time.perf_counter() - begin

    count = len(rotation)
    block(count)  # first use compiles, allocates and warms caches
    elapsed = block(count)
    if elapsed < BLOCK_SECONDS:
        count = min(MOST_CALLS_A_BLOCK, math.ceil(count * BLOCK_SECONDS / max(elapsed, 1e-6)))
    return lambda: block(count) * 1e3 / count


def device_event() -> torch.cuda.Event:
    """Return an event that keeps the time at which the device passes it."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def elapsed_ms(begin: torch.cuda.Event, end: torch.cuda.Event) -> float:
    """Return the device's time between two events that it has passed."""
    return float(begin.elapsed_time(end))


@contextmanager
def no_collection() -> Iterator[None]:
    """Keep Python's cyclic garbage collector out of what is measured or captured."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
