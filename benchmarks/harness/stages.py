"""When the stages of an all-reduce over several machines are under way, of one rank."""

from __future__ import annotations

import time
from typing import Any

from torch import Tensor

import hfreduce

Spans = list[tuple[float, float]]


class _Timed:
    """Something whose calls of one method are noted: when each began and ended."""

    def __init__(self, inner: Any, method: str, spans: Spans) -> None:
        self._inner, self._method, self._spans = inner, method, spans

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name != self._method:
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return found(*arguments, **options)
            finally:
                self._spans.append((start, time.perf_counter()))

        return call


def under_way(reducer: hfreduce.HierarchicalReducer, tensor: Tensor) -> dict[str, float]:
    """Reduce a tensor, and return for how long each stage was under way, in ms; all ranks call it.

    Returns:
        "call": all of it. "node": sums and copies within the machine. "network". "both": at once.
    """
    inside: Spans = []
    outside: Spans = []
    pieces, local = reducer._pieces, reducer.local
    network, group = pieces._network, local._group
    pieces._network = _Timed(network, "all_reduce", outside)  # type: ignore[assignment]
    local._group = _Timed(group, "run", inside)  # type: ignore[assignment]
    try:
        start = time.perf_counter()
        reducer.all_reduce(tensor)
        whole = time.perf_counter() - start
    finally:
        pieces._network, local._group = network, group
    within, between = _merged(inside), _merged(outside)
    both = sum(
        max(0.0, min(end, last) - max(begin, first))
        for begin, end in within
        for first, last in between
    )
    seconds = {"call": whole, "node": _length(within), "network": _length(between), "both": both}
    return {name: round(value * 1e3, 3) for name, value in seconds.items()}


def _merged(spans: Spans) -> Spans:
    merged: Spans = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Spans) -> float:
    return sum(end - begin for begin, end in spans)
