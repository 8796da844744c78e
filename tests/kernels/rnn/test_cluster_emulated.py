"""The cluster kernels' own sources, run on the CPU, make the buffers that they promise."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from hfai.kernels.rnn import launch, programs, status
from hfai.kernels.rnn.cluster_dispatch import backward_shapes, forward_shapes
from hfai.kernels.rnn.cluster_plan import ClusterPlan, Shape
from hfai.kernels.rnn.plan import Cell, Precision
from hfai.kernels.rnn.programs import Configuration, Program
from tests.kernels.rnn import by_hand
from tests.kernels.rnn import test_emulated as grid
from tests.kernels.rnn.emulated import COMPILER, emulated
from tests.kernels.rnn.test_emulated import BF16, FP16, FP32

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the emulation")

LSTM, GRU, TANH, RELU = Cell
TF32, SPLIT, HALF = Precision


@pytest.fixture(autouse=True)
def status_word(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Put the emulator where programs are compiled and loaded; return the status word."""

    def load(
        self: Configuration,
        sources: list[str],
        name: str,
        constants: Any,
        shape: Shape,
        shared: int,
    ) -> Program:
        constants = constants | {"PATIENCE": programs.CLUSTER_PATIENCE}
        run = emulated(sources, constants, self.dtype, name)
        kernel = grid._Kernel(run, 32 * shape.warps, shared)
        return Program(kernel, 1)  # type: ignore[arg-type]

    word = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(Configuration, "_load_cluster", load)
    monkeypatch.setattr(status, "address", lambda device: word.data_ptr())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return word


def _plan(
    cell: Cell, hidden: int, precision: Precision, forward: tuple[int, int, int],
    backward: tuple[int, int, int], **options: Any,
) -> ClusterPlan:  # fmt: skip
    """`forward` and `backward`: blocks of a cluster, warps of a block, units of a block."""
    defaults = {"directions": 1, "columns": 4 if precision is SPLIT else 8}
    return ClusterPlan(
        cell=cell,
        hidden=hidden,
        precision=precision,
        forward_shape=Shape(*forward),
        backward_shape=Shape(*backward),
        **(defaults | options),
    )


def _small(precision: Precision) -> ClusterPlan:
    return _plan(LSTM, 20, precision, (4, 2, 8), (2, 2, 16))


@pytest.mark.parametrize("cell", Cell)
def test_every_cell_in_both_directions_and_sequences_of_different_lengths(cell: Cell) -> None:
    forward = (2, 1, 16) if cell.gates == 1 else (4, 2, 8)
    plan = _plan(cell, 21, SPLIT, forward, (2, 2, 16), directions=2)
    grid._check(grid._call(plan, FP32, steps=6, batch=3))
    lengths = [6, 6, 5, 4, 2, 1, 1]
    grid._check(grid._call(plan, FP32, steps=6, batch=7, lengths=lengths))


@pytest.mark.parametrize(
    ("cell", "dtype", "precision", "forward", "backward", "options"),
    [
        (LSTM, FP32, TF32, (8, 2, 8), (4, 3, 8), {"columns": 4}),
        (LSTM, BF16, HALF, (2, 5, 20), (8, 4, 8), {"columns": 4, "directions": 2}),
        (GRU, BF16, HALF, (16, 1, 4), (1, 4, 32), {}),
        (GRU, FP16, HALF, (4, 1, 16), (4, 4, 8), {"short_messages": True}),
        (TANH, FP16, HALF, (2, 1, 16), (2, 2, 16), {}),
    ],
)
def test_every_precision_and_size_of_cluster(
    cell: Cell, dtype: torch.dtype, precision: Precision, forward: tuple[int, int, int],
    backward: tuple[int, int, int], options: dict[str, Any],
) -> None:  # fmt: skip
    plan = _plan(cell, 30, precision, forward, backward, **options)
    grid._check(grid._call(plan, dtype, steps=6, batch=9))


def test_h_in_several_rounds() -> None:
    plan = _plan(LSTM, 135, TF32, (4, 9, 36), (4, 9, 40))
    grid._check(grid._call(plan, FP32, steps=5, batch=2))


def test_without_bias_states_and_some_gradients() -> None:
    call = grid._call(_small(SPLIT), FP32, steps=3, batch=2, bias=False, states=False)
    grid._check(call, grads="dhn")
    grid._check(call, grads="dy")


def test_one_unit_one_sequence_one_step() -> None:
    plan = _plan(GRU, 1, SPLIT, (1, 2, 8), (1, 1, 8))
    grid._check(grid._call(plan, FP32, steps=1, batch=1))


@pytest.mark.parametrize(("dtype", "precision"), [(FP32, SPLIT), (FP32, TF32), (BF16, HALF)])
def test_a_nan_passes_to_its_own_sequence_and_later_steps_alone(
    dtype: torch.dtype, precision: Precision
) -> None:
    call = grid._call(_small(precision), dtype, steps=6, batch=3)
    # Every bit set: the very pattern that means "not there yet" in the exchanged places.
    bits = {FP32: torch.int32, BF16: torch.int16}[dtype]
    call.gates.view(bits)[0, 2 * 3 + 1, 3] = -1
    made, _ = call.forward(launch.forward)
    touched = made.y.view(6, 3, 20).isnan()
    assert touched[2, 1].any()
    assert touched[3:, 1].all()
    assert not touched[:2].any()
    assert not touched[:, [0, 2]].any()


@pytest.mark.parametrize(("dtype", "precision"), [(FP32, TF32), (BF16, HALF), (FP32, SPLIT)])
def test_an_infinite_state_is_no_nan_elsewhere(dtype: torch.dtype, precision: Precision) -> None:
    call = grid._call(_small(precision), dtype, steps=3, batch=2)
    assert call.h0 is not None
    call.h0[0, 0, 2] = float("inf")
    made, _ = call.forward(launch.forward)
    expected, _ = call.forward(by_hand.forward)
    assert expected.y.isfinite().all()
    grid._assert_same(made.y, expected.y, grid.TOLERANCES[dtype, precision])


@pytest.mark.parametrize("forward", [True, False])
def test_a_block_that_never_answers_ends_every_wait_and_is_reported(
    forward: bool, status_word: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "CLUSTER_PATIENCE", 50)
    call = grid._call(_small(SPLIT), FP32, steps=3, batch=2)
    made, gates = call.forward(by_hand.forward)
    configuration = call.configuration
    program = configuration.forward(True) if forward else configuration.backward()
    program.kernel.run.mute(1)  # type: ignore[attr-defined]
    try:
        if forward:
            call.forward(launch.forward)
        else:
            launch.backward(
                configuration, call.steps, gates, made.cells, made.states, call.weights, call.c0,
                made.y, None, None,
            )  # fmt: skip
    finally:
        program.kernel.run.mute(-1)  # type: ignore[attr-defined]
    assert program.kernel.ended  # type: ignore[attr-defined]
    assert status_word.item() == 1


def test_the_same_bits_come_out_twice() -> None:
    call = grid._call(_small(SPLIT), FP32, steps=3, batch=2)
    first, second = (call.forward(launch.forward)[0].y for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.skipif("HFAI_LONG_TESTS" not in os.environ, reason="minutes; set HFAI_LONG_TESTS=1")
@pytest.mark.parametrize("seed", range(60))
def test_random_plans(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def one_of(options: list[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=draw))]

    cell = one_of(list(Cell))
    dtype, precision = one_of(list(grid.TOLERANCES))
    hidden = one_of([1, 7, 8, 33, 64, 70, 100])
    batch, steps = one_of([1, 2, 3, 5, 9, 17]), one_of([1, 2, 5, 9])
    lengths = sorted((one_of(list(range(1, steps + 1))) for _ in range(batch)), reverse=True)
    plan = ClusterPlan(
        cell, hidden, one_of([1, 2]), precision, 4 if precision is SPLIT else one_of([4, 8]),
        one_of(list(forward_shapes(cell, hidden))), one_of(list(backward_shapes(hidden))),
        short_messages=precision is HALF and one_of([False, True]),
    )  # fmt: skip
    call = grid._call(
        plan, dtype, max(lengths), batch, one_of([None, lengths]),
        bias=one_of([False, True]), states=one_of([False, True]),
    )  # fmt: skip
    grid._check(call)
