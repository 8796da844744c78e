"""The streams of a wavefront's layers, and the states that its stretches hand on."""

from __future__ import annotations

import functools

import torch
from torch import Tensor


class Lanes:
    """The layers' streams during one pass, and what each has done by now."""

    def __init__(self, device: int, layers: int) -> None:
        self._caller = torch.cuda.current_stream(device)
        self._streams = _streams(device, layers)
        self._done: dict[tuple[int, int], torch.cuda.Event] = {}
        self._last: dict[int, torch.cuda.Event] = {}
        begun = self._caller.record_event()
        for stream in self._streams:
            stream.wait_event(begun)

    def ready(self, layer: int, *, waits: bool) -> int:
        """Return a lane's raw stream; `waits`: for all that the caller's has been given."""
        if waits:
            self._streams[layer].wait_event(self._caller.record_event())
        return int(self._streams[layer].cuda_stream)

    def did(self, layer: int, turn: int) -> None:
        """Note that a lane has been given a stretch."""
        self._done[layer, turn] = self._last[layer] = self._streams[layer].record_event()

    def wait_for(self, layer: int, turn: int) -> None:
        """Let the caller's stream wait for a stretch."""
        self._caller.wait_event(self._done[layer, turn])

    def __enter__(self) -> Lanes:
        return self

    def __exit__(self, *_: object) -> None:
        # Also where a launch was refused: memory must not be given back under a running kernel.
        for event in self._last.values():
            self._caller.wait_event(event)


@functools.cache
def _streams(device: int, count: int) -> list[torch.cuda.Stream]:
    """Return one stream a layer; stacks of as many layers share them, which orders them only."""
    # torch leaves its constructor untyped.
    return [torch.cuda.Stream(device) for _ in range(count)]  # type: ignore[no-untyped-call]


class Carried:
    """States between stretches: written by one and read by the next, in two buffers in turn.

    A block may still read the state before a stretch when another has the one after it.
    """

    def __init__(self, at_last: Tensor | None) -> None:
        self._at_last = at_last
        self._between = [None if at_last is None else torch.empty_like(at_last) for _ in range(2)]

    def before(self, turn: int, at_first: Tensor | None) -> Tensor | None:
        """Return where the state before a stretch is, all layers'."""
        return self._between[1 - turn % 2] if turn else at_first

    def after(self, turn: int, last: bool) -> Tensor | None:
        """Return where the state after a stretch goes."""
        return self._at_last if last else self._between[turn % 2]
