"""Plans on clusters fit their device, cover their layer, and are used where they are faster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfai.kernels.jit import DeviceLimits
from hfai.kernels.rnn import cluster_dispatch
from hfai.kernels.rnn.cluster_plan import NOT_PORTABLE, most_registers
from hfai.kernels.rnn.plan import Cell, Precision
from tests.kernels.compiled import DEVICES

HOPPER = DEVICES["sm_90"]


@given(
    cell=st.sampled_from(Cell),
    hidden=st.integers(1, 600),
    directions=st.integers(1, 2),
    batch=st.integers(1, 300),
    precision=st.sampled_from(Precision),
    limits=st.sampled_from([DEVICES["sm_90"], DEVICES["sm_100"]]),
)
def test_every_chosen_plan_fits_its_device_and_covers_the_layer(
    cell: Cell,
    hidden: int,
    directions: int,
    batch: int,
    precision: Precision,
    limits: DeviceLimits,
) -> None:
    plan = cluster_dispatch.choose(cell, hidden, directions, batch, precision, limits)
    if plan is None:
        return
    assert hidden <= plan.width < hidden + 8
    assert plan.clusters(batch) * plan.columns >= directions * batch
    for shape in (plan.forward_shape, plan.backward_shape):
        assert shape.cluster <= NOT_PORTABLE[limits.architecture]
        assert shape.cluster * shape.units >= plan.width
        assert (shape.cluster - 1) * shape.units < hidden  # no block without units
    assert plan.forward_registers <= most_registers(plan.forward_shape.warps)
    assert plan.backward_registers <= most_registers(plan.backward_shape.warps)
    assert plan.forward_shared_bytes < limits.shared_bytes_per_block
    assert plan.backward_shared_bytes < limits.shared_bytes_per_block
    # What the sources assert of their constants.
    shape = plan.forward_shape
    assert shape.units == shape.warps * plan.forward_tiles * plan.tile_units
    assert plan.backward_shape.units % 8 == 0
    assert precision is not Precision.SPLIT or plan.columns == 4


@pytest.mark.parametrize("architecture", ["sm_80", "sm_89"])
def test_devices_without_clusters_have_no_plan(architecture: str) -> None:
    limits = DEVICES[architecture]
    for hidden in (8, 64, 256):
        plan = cluster_dispatch.choose(Cell.LSTM, hidden, 1, 4, Precision.HALF, limits)
        assert plan is None


def test_weights_that_do_not_fit_have_no_plan() -> None:
    for cell in Cell:
        plan = cluster_dispatch.choose(cell, 2048, 1, 4, Precision.TF32, HOPPER)
        assert plan is None
