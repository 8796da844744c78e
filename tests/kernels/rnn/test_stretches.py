"""How a wavefront cuts and orders its work; the kernels in it run on a GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfai.kernels.rnn.launch import Steps
from hfai.kernels.rnn.stretches import WORTHWHILE, _time, cut, diagonals, rows_of


@given(st.integers(1, 500), st.integers(1, 9), st.integers(1, 8))
def test_stretches_cover_all_steps_once_in_order(steps: int, batch: int, wanted: int) -> None:
    stretches = min(steps, wanted)
    parts = cut(Steps(steps, batch, steps * batch), stretches)
    assert [first for first, _ in parts] == [
        sum(part.steps for _, part in parts[:turn]) for turn in range(stretches)
    ]
    assert sum(part.steps for _, part in parts) == steps
    lengths = [part.steps for _, part in parts]
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1
    rows = [row for part in parts for row in range(steps * batch)[rows_of(part, batch)]]
    assert rows == list(range(steps * batch))


@pytest.mark.parametrize(
    ("layers", "steps", "at_once", "gains"),
    [(4, 1000, 4, True), (2, 1000, 2, True), (4, 400, 4, False), (2, 100, 4, False)],
)
def test_a_wavefront_is_for_many_steps(layers: int, steps: int, at_once: int, gains: bool) -> None:
    alone = _time(layers, 1, steps, at_once)
    best = min(_time(layers, count, steps, at_once) for count in range(2, 9))
    assert (best < WORTHWHILE * alone) == gains


@given(st.integers(1, 12), st.integers(1, 9))
def test_a_stretch_comes_after_the_ones_it_needs(layers: int, stretches: int) -> None:
    order = diagonals(layers, stretches)
    assert sorted(order) == [(layer, turn) for layer in range(layers) for turn in range(stretches)]
    place = {both: at for at, both in enumerate(order)}
    for layer, turn in order:
        if layer:
            # Of an earlier diagonal, with all of a diagonal between: it has had time to end.
            assert place[layer - 1, turn] < place[layer, turn]
        if turn:
            assert place[layer, turn - 1] < place[layer, turn]
