"""The kernels' own sources, run thread by thread on the CPU, make the buffers that they promise."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from hfai.kernels.rnn import launch, programs, status
from hfai.kernels.rnn.launch import Steps
from hfai.kernels.rnn.plan import MOST_ESTIMATED, Cell, Plan, Precision
from hfai.kernels.rnn.programs import Configuration, Program
from tests.kernels.rnn import by_hand
from tests.kernels.rnn.emulated import COMPILER, Emulated, emulated

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ to compile the emulation")

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
LSTM, GRU, TANH, RELU = Cell
TF32, SPLIT, HALF = Precision
TOLERANCES = {(FP32, SPLIT): 2e-6, (FP32, TF32): 3e-3, (FP16, HALF): 4e-3, (BF16, HALF): 3e-2}
MULTIPROCESSORS = 132


@dataclass
class _Kernel:
    """Stands for a loaded kernel: launches are runs of the emulator, and must end."""

    run: Emulated
    block: int
    shared_bytes: int
    ended: bool = True

    def launch(self, grid: int, stream: int, *arguments: int) -> None:
        self.ended = self.run(grid, self.block, self.shared_bytes, *arguments)


@pytest.fixture(autouse=True)
def status_word(monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """Put the emulator where programs are compiled and loaded; return the status word."""

    def load(
        self: Configuration, sources: list[str], name: str, constants: Any, block: int, shared: int
    ) -> Program:
        constants = constants | {"PATIENCE": programs.PATIENCE}
        kernel = _Kernel(emulated(sources, constants, self.dtype, name), block, shared)
        return Program(kernel, MULTIPROCESSORS // self.plan.blocks)  # type: ignore[arg-type]

    word = torch.zeros(1, dtype=torch.int32)
    monkeypatch.setattr(Configuration, "_load", load)
    monkeypatch.setattr(status, "address", lambda device: word.data_ptr())
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    return word


@dataclass
class _Call:
    """Random operands of one call, the same for the kernels and for what is done by hand."""

    configuration: Configuration
    steps: Steps
    gates: Tensor
    weights: list[Tensor]
    biases: list[tuple[Tensor, Tensor]] | None
    h0: Tensor | None
    c0: Tensor | None

    def forward(self, how: Any, save: bool = True) -> tuple[launch.Forward, Tensor]:
        gates = self.gates.clone()
        arguments = (self.weights, self.biases, self.h0, self.c0, save)
        return how(self.configuration, self.steps, gates, *arguments), gates


def _call(
    plan: Plan, dtype: torch.dtype, steps: int, batch: int, lengths: list[int] | None = None,
    *, bias: bool = True, states: bool = True,
) -> _Call:  # fmt: skip
    generator = torch.Generator().manual_seed(3)

    def uniform(*shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.rand(shape, generator=generator, dtype=torch.float64) * 2 - 1
        return (drawn * scale).to(dtype)

    shape = Steps(steps, batch, steps * batch)
    if lengths is not None:
        tensor = torch.tensor(lengths)
        counts = torch.tensor([int((tensor > t).sum()) for t in range(steps)])
        shape = Steps(steps, batch, sum(lengths), tensor, counts.cumsum(0) - counts)
    directions, rows = range(plan.directions), plan.cell.gates * plan.hidden
    scale = 2.0 / plan.hidden**0.5
    return _Call(
        Configuration(0, dtype, plan),
        shape,
        uniform(plan.directions, shape.rows, plan.gate_pitch),
        [uniform(rows, plan.hidden, scale=scale) for _ in directions],
        [(uniform(rows), uniform(rows)) for _ in directions] if bias else None,
        uniform(plan.directions, batch, plan.hidden) if states else None,
        uniform(plan.directions, batch, plan.hidden) if states and plan.cell.has_c else None,
    )


def _assert_same(actual: Tensor | None, expected: Tensor | None, tolerance: float) -> None:
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert actual.shape == expected.shape
    torch.testing.assert_close(
        actual.double(), expected.double(), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def _check(call: _Call, *, grads: str = "dy dhn dcn") -> None:
    """Run both passes on the emulator and by hand and compare every buffer that is left."""
    plan, dtype = call.configuration.plan, call.configuration.dtype
    tolerance = TOLERANCES[dtype, plan.precision]
    kept = plan.cell.kept * plan.hidden if plan.cell.gates > 1 else 0
    made, gates = call.forward(launch.forward)
    expected, expected_gates = call.forward(by_hand.forward)
    for name in ("y", "hn", "cn", "states", "cells"):
        _assert_same(getattr(made, name), getattr(expected, name), tolerance)
    _assert_same(gates[..., :kept], expected_gates[..., :kept], tolerance)

    generator = torch.Generator().manual_seed(4)
    like = {"dy": expected.y, "dhn": expected.hn, "dcn": expected.cn}
    given = [
        torch.randn(tensor.shape, generator=generator).to(dtype)
        if tensor is not None and name in grads.split()
        else None
        for name, tensor in like.items()
    ]
    arguments = (
        expected_gates, expected.cells, expected.states, call.weights, call.c0, *given
    )  # fmt: skip
    ours = launch.backward(call.configuration, call.steps, *arguments)
    theirs = by_hand.backward(call.configuration, call.steps, *arguments)
    width = plan.cell.kept * plan.hidden
    scale = max(1.0, theirs[0][..., :width].abs().max().item(), theirs[1].abs().max().item())
    _assert_same(ours[0][..., :width], theirs[0][..., :width], tolerance * scale)
    _assert_same(ours[1], theirs[1], tolerance * scale)
    _assert_same(ours[2], theirs[2], tolerance * scale)
    ended = [program.kernel.ended for program in call.configuration._programs.values()]  # type: ignore[attr-defined]
    assert ended == [True, True]


def _plan(cell: Cell, hidden: int, precision: Precision, **options: Any) -> Plan:
    defaults = {"directions": 1, "units": 8, "columns": 4, "tiles": 1}
    warps = {"forward_warps": 8, "backward_warps": 8}
    return Plan(cell=cell, hidden=hidden, precision=precision, **(defaults | warps | options))


@pytest.mark.parametrize("cell", Cell)
def test_every_cell_in_both_directions(cell: Cell) -> None:
    plan = _plan(cell, 21, SPLIT, directions=2, wide_rest=True)
    _check(_call(plan, FP32, steps=4, batch=3))


@pytest.mark.parametrize("cell", [LSTM, GRU])
def test_sequences_of_different_lengths(cell: Cell) -> None:
    plan = _plan(cell, 19, SPLIT, directions=2, wide_rest=True)
    _check(_call(plan, FP32, steps=4, batch=5, lengths=[4, 4, 2, 1, 1]))


@pytest.mark.parametrize(
    ("cell", "dtype", "precision", "options"),
    [
        (LSTM, FP32, TF32, {"columns": 8, "tiles": 2, "backward_warps": 16}),
        (LSTM, BF16, HALF, {"columns": 8, "tiles": 2, "forward_warps": 16}),
        (GRU, FP16, HALF, {"columns": 8, "directions": 2}),
        (TANH, FP16, HALF, {"units": 16}),
        (LSTM, BF16, HALF, {"short_messages": True}),
        (GRU, FP16, HALF, {"columns": 8, "tiles": 2, "directions": 2, "short_messages": True}),
        (LSTM, FP32, SPLIT, {"units": 16}),
        (LSTM, BF16, HALF, {"columns": 16, "tiles": 2, "units": 16, "short_messages": True}),
        (GRU, FP32, TF32, {"columns": 16, "directions": 2}),
        (TANH, FP16, HALF, {"columns": 32, "units": 16, "short_messages": True}),
    ],
)
def test_every_precision_tile_and_block_size(
    cell: Cell, dtype: torch.dtype, precision: Precision, options: dict[str, Any]
) -> None:
    plan = _plan(cell, 37, precision, **options)
    _check(_call(plan, dtype, steps=3, batch=max(9, plan.columns + 3)))


@pytest.mark.parametrize(
    ("cell", "dtype", "precision", "options"),
    [
        (LSTM, FP32, TF32, {"columns": 8, "tiles": 2, "units": 16}),
        (GRU, BF16, HALF, {"columns": 8, "short_messages": True}),
        (LSTM, FP32, SPLIT, {}),
        (LSTM, FP32, SPLIT, {"wide_rest": True}),
    ],
)
def test_a_matrix_partly_in_shared_memory(
    cell: Cell, dtype: torch.dtype, precision: Precision, options: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setitem(MOST_ESTIMATED, 8, 60)  # too few for all of it
    plan = _plan(cell, 70, precision, **options)
    assert plan.forward_in_shared > 0
    assert plan.backward_in_shared > 0
    _check(_call(plan, dtype, steps=2, batch=9))


def test_without_bias_states_and_some_gradients() -> None:
    plan = _plan(LSTM, 12, SPLIT, wide_rest=True)
    call = _call(plan, FP32, steps=3, batch=2, bias=False, states=False)
    _check(call, grads="dhn")
    _check(call, grads="dy")


def test_one_unit_one_sequence_one_step() -> None:
    _check(_call(_plan(GRU, 1, SPLIT, wide_rest=True), FP32, steps=1, batch=1))


def test_groups_that_do_not_fit_together_come_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(globals(), "MULTIPROCESSORS", 5)  # room for two groups of two blocks
    plan = _plan(LSTM, 12, SPLIT, directions=2)
    _check(_call(plan, FP32, steps=3, batch=6))


@pytest.mark.parametrize(("dtype", "precision"), [(FP32, SPLIT), (BF16, HALF)])
def test_a_nan_passes_to_its_own_sequence_and_later_steps_alone(
    dtype: torch.dtype, precision: Precision
) -> None:
    call = _call(_plan(GRU, 20, precision), dtype, steps=4, batch=3)
    # Every bit set: the very pattern that means "not there yet" in the exchanged buffer.
    bits = {FP32: torch.int32, BF16: torch.int16}[dtype]
    call.gates.view(bits)[0, 2 * 3 + 1, 3] = -1
    made, _ = call.forward(launch.forward)
    touched = made.y.view(4, 3, 20).isnan()
    assert touched[2, 1].any()
    assert touched[3, 1].all()
    assert not touched[:2].any()
    assert not touched[:, [0, 2]].any()


def test_infinite_values_of_relu_pass() -> None:
    call = _call(_plan(RELU, 20, SPLIT), FP32, steps=2, batch=2)
    call.gates[0, 0, 3] = float("inf")
    made, _ = call.forward(launch.forward)
    assert made.y[0, 0, 3].isinf()
    assert made.y.view(2, 2, 20)[:, 1].isfinite().all()


@pytest.mark.parametrize(
    ("dtype", "precision", "options"),
    [(FP32, TF32, {}), (BF16, HALF, {}), (FP32, SPLIT, {}), (FP32, SPLIT, {"wide_rest": True})],
)
def test_an_infinite_state_is_no_nan_elsewhere(
    dtype: torch.dtype, precision: Precision, options: dict[str, Any]
) -> None:
    call = _call(_plan(LSTM, 9, precision, **options), dtype, steps=3, batch=2)
    assert call.h0 is not None
    call.h0[0, 0, 2] = float("inf")
    made, _ = call.forward(launch.forward)
    expected, _ = call.forward(by_hand.forward)
    assert expected.y.isfinite().all()
    _assert_same(made.y, expected.y, TOLERANCES[dtype, precision])


@pytest.mark.parametrize(("dtype", "precision"), [(FP32, TF32), (FP32, SPLIT), (FP16, HALF)])
@pytest.mark.parametrize("scale", [1e-2, 1e-5])
def test_small_values_keep_their_digits(
    dtype: torch.dtype, precision: Precision, scale: float
) -> None:
    call = _call(_plan(TANH, 9, precision), dtype, steps=1, batch=2, bias=False, states=False)
    call.gates.mul_(scale)
    made, _ = call.forward(launch.forward)
    expected, _ = call.forward(by_hand.forward)
    error = (made.y.double() - expected.y.double()).norm() / expected.y.double().norm()
    assert error <= {FP32: 1e-5, FP16: 5e-3}[dtype]


@pytest.mark.parametrize("size", [3e3, 3e4])
def test_large_gradients_in_half_precision_stay_finite(size: float) -> None:
    plan = _plan(TANH, 16, HALF, columns=8, short_messages=True)
    call = _call(plan, FP16, steps=2, batch=3, bias=False, states=False)
    call.gates.mul_(1e-3)
    call.weights[0].copy_(torch.eye(16))
    made, gates = call.forward(by_hand.forward)
    dy = torch.zeros_like(made.y)
    dy[3:] = size  # the last step's
    arguments = (gates, made.cells, made.states, call.weights, call.c0, dy, None, None)
    ours = launch.backward(call.configuration, call.steps, *arguments)
    theirs = by_hand.backward(call.configuration, call.steps, *arguments)
    _assert_same(ours[1] / size, theirs[1] / size, 4e-3)


def test_a_block_that_never_answers_ends_every_wait_and_is_reported(
    status_word: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "PATIENCE", 50)
    call = _call(_plan(LSTM, 20, SPLIT), FP32, steps=3, batch=2)
    blocks = call.configuration.plan.blocks
    program = call.configuration.forward(True)
    whole = program.kernel.launch

    def without_the_last_block(grid: int, *arguments: int) -> None:
        assert grid == blocks
        whole(grid - 1, *arguments)

    monkeypatch.setattr(program.kernel, "launch", without_the_last_block)
    call.forward(launch.forward)
    assert program.kernel.ended  # type: ignore[attr-defined]
    assert status_word.item() == 1


def test_the_same_bits_come_out_twice() -> None:
    call = _call(_plan(LSTM, 30, SPLIT), FP32, steps=3, batch=2)
    first, second = (call.forward(launch.forward)[0].y for _ in range(2))
    assert torch.equal(first, second)


@pytest.mark.skipif("HFAI_LONG_TESTS" not in os.environ, reason="minutes; set HFAI_LONG_TESTS=1")
@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)

    def one_of(options: list[Any]) -> Any:
        return options[int(torch.randint(len(options), (), generator=draw))]

    cell = one_of(list(Cell))
    dtype, precision = one_of(list(TOLERANCES))
    batch, steps = one_of([1, 2, 3, 5, 9, 17]), one_of([1, 2, 5])
    lengths = sorted((one_of(list(range(1, steps + 1))) for _ in range(batch)), reverse=True)
    plan = _plan(
        cell, one_of([1, 7, 8, 33, 64, 70]), precision,
        directions=one_of([1, 2]), units=one_of([8, 16]), tiles=one_of([1, 2, 4]),
        columns=4 if precision is SPLIT else one_of([4, 8, 16]),
        forward_warps=one_of([8, 16]), backward_warps=one_of([8, 16]),
        wide_rest=one_of([True, False]),
    )  # fmt: skip
    _check(_call(plan, dtype, lengths[0], batch, one_of([None, lengths])))
