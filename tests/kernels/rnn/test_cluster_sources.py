"""The cluster kernels compile for every architecture that has clusters, and do not spill."""

from __future__ import annotations

import os

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.rnn import cluster_dispatch, programs
from hfai.kernels.rnn.cluster_plan import ClusterPlan, most_registers
from hfai.kernels.rnn.plan import Cell, Precision
from tests.kernels.compiled import DEVICES, resources

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, which are for Linux")

TYPES = {
    Precision.TF32: torch.float32,
    Precision.SPLIT: torch.float32,
    Precision.HALF: torch.bfloat16,
}
# Weights that lie on no vectors are loaded one by one, all before the first is packed: where the
# matrix takes most of the registers, some wait in local memory, once a launch.
MOST_SPILLED = 160
SIZES = [(Cell.LSTM, 128, 8), (Cell.RNN_RELU, 64, 4)]
LONG = [
    (cell, hidden, batch)
    for cell in (Cell.LSTM, Cell.GRU, Cell.RNN_TANH)
    for hidden in (1, 32, 64, 96, 128, 160, 192, 256, 384, 512)
    for batch in (4, 8)
]


def check(plan: ClusterPlan, architecture: str) -> None:
    passes = (
        (True, programs.CLUSTER_FORWARD, plan.forward_shape, plan.forward_shared_bytes),
        (False, programs.CLUSTER_BACKWARD, plan.backward_shape, plan.backward_shared_bytes),
    )
    for forward, sources, shape, shared_bytes in passes:
        constants = plan.constants(forward=forward) | {"PATIENCE": programs.CLUSTER_PATIENCE}
        constants |= {"SAVE": True} if forward else {}
        text = jit.program_text(sources, constants, {"T": TYPES[plan.precision]})
        (kernel,) = resources(text, architecture).values()
        full = kernel.registers >= most_registers(shape.warps) - 2
        assert kernel.spilled <= (MOST_SPILLED if full else 0), (plan, kernel)
        assert kernel.registers <= most_registers(shape.warps)
        assert kernel.shared + shared_bytes <= DEVICES[architecture].shared_bytes_per_block


@pytest.mark.parametrize("architecture", ["sm_90", "sm_100"])
@pytest.mark.parametrize("precision", Precision)
def test_the_chosen_plans(architecture: str, precision: Precision) -> None:
    chosen = 0
    sizes = LONG if "HFAI_LONG_TESTS" in os.environ else SIZES
    for cell, hidden, batch in sizes if architecture == "sm_90" else sizes[:1]:
        limits = DEVICES[architecture]
        plan = cluster_dispatch.choose(cell, hidden, 1, batch, precision, limits)
        if plan is not None:
            check(plan, architecture)
            chosen += 1
    assert chosen >= 1
