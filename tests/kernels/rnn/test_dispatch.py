"""Plans fit their device, and what torch does faster is left to it in words."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn import dispatch
from hfai.kernels.rnn.plan import MOST_ESTIMATED, Cell, Plan, Precision
from tests.kernels.compiled import DEVICES

HOPPER = DEVICES["sm_90"]


@given(
    cell=st.sampled_from(Cell),
    hidden=st.integers(1, 2000),
    directions=st.integers(1, 2),
    batch=st.integers(1, 300),
    precision=st.sampled_from(Precision),
    limits=st.sampled_from(list(DEVICES.values())),
)
def test_every_chosen_plan_fits_its_device_and_covers_the_layer(
    cell: Cell,
    hidden: int,
    directions: int,
    batch: int,
    precision: Precision,
    limits: DeviceLimits,
) -> None:
    plan = dispatch.choose(cell, hidden, directions, batch, precision, limits)
    if plan is None:
        return
    assert plan.blocks <= limits.multiprocessors
    assert plan.width >= hidden
    assert plan.groups(batch) * plan.sequences >= directions * batch
    assert plan.forward_registers <= MOST_ESTIMATED[plan.forward_warps]
    assert plan.backward_registers <= MOST_ESTIMATED[plan.backward_warps]
    assert plan.forward_shared_bytes < limits.shared_bytes_per_block
    assert plan.backward_shared_bytes < limits.shared_bytes_per_block
    # What the sources assert of their constants.
    assert plan.units * (2 if precision is Precision.HALF else 4) % 16 == 0
    assert (32 * plan.backward_warps) % (plan.cells // 4) == 0
    assert precision is not Precision.SPLIT or plan.columns == 4


@pytest.mark.parametrize("precision", Precision)
def test_the_reference_layer_stays_on_a_hopper_gpu(precision: Precision) -> None:
    for cell in Cell:
        plan = dispatch.choose(cell, 985, 1, 4, precision, HOPPER)
        assert plan is not None
        reason = dispatch.why_left_to_torch(plan, 4, 1000, HOPPER)
        assert reason is None


def test_both_directions_of_a_layer_run_side_by_side_where_they_fit() -> None:
    plan = dispatch.choose(Cell.LSTM, 256, 2, 32, Precision.TF32, HOPPER)
    assert plan is not None
    assert plan.groups(32) * plan.blocks <= HOPPER.multiprocessors


def test_weights_that_do_not_fit_have_no_plan() -> None:
    assert dispatch.choose(Cell.LSTM, 2048, 1, 4, Precision.TF32, HOPPER) is None


def test_what_has_no_registers_stays_in_shared_memory() -> None:
    for hidden, precision in ((1150, Precision.TF32), (2048, Precision.HALF)):
        plan = dispatch.choose(Cell.LSTM, hidden, 1, 4, precision, HOPPER)
        assert plan is not None
        assert plan.forward_in_shared > 0
        assert plan.backward_in_shared > 0
    plan = dispatch.choose(Cell.LSTM, 985, 1, 4, Precision.TF32, HOPPER)
    assert plan is not None
    assert plan.forward_in_shared == plan.backward_in_shared == 0


def _why(hidden: int, batch: int, steps: int) -> str:
    plan: Plan | None = dispatch.choose(Cell.LSTM, hidden, 1, batch, Precision.TF32, HOPPER)
    assert plan is not None
    reason = dispatch.why_left_to_torch(plan, batch, steps, HOPPER)
    assert reason is not None
    return reason


@pytest.mark.parametrize(("batch", "short"), [(4, False), (8, True), (64, True)])
def test_messages_are_short_where_that_saves_lines(batch: int, short: bool) -> None:
    for precision in Precision:
        plan = dispatch.choose(Cell.LSTM, 512, 1, batch, precision, HOPPER)
        assert plan is not None
        assert plan.short_messages == (short and precision is Precision.HALF)


def test_what_is_left_to_torch_is_said_in_words() -> None:
    assert "8 steps" in _why(985, 4, 8)
    assert "64 hidden units" in _why(64, 4, 1000)
    assert "batch of 512" in _why(985, 512, 1000)


@pytest.mark.parametrize(("batch", "ours"), [(64, True), (65, False)])
def test_no_batch_is_ours_that_was_not_timed(batch: int, ours: bool) -> None:
    for precision in Precision:
        plan = dispatch.choose(Cell.LSTM, 256, 1, batch, precision, HOPPER)
        assert plan is not None
        reason = dispatch.why_left_to_torch(plan, batch, 200, HOPPER)
        assert (reason is None) == ours
        assert ours or "batch of 65" in str(reason)
