"""The recurrent sources compile for every architecture, without a GPU and without spilling."""

from __future__ import annotations

import os

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.rnn import dispatch, programs
from hfai.kernels.rnn.plan import MOST_REGISTERS, Cell, Plan, Precision
from tests.kernels.compiled import DEVICES, resources

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, which are for Linux")

TYPES = {
    Precision.TF32: torch.float32,
    Precision.SPLIT: torch.float32,
    Precision.HALF: torch.bfloat16,
}
# Where the matrix only just fits into the registers, a few of them move to the first-level cache
# and back each step; fewer units a block would not fit the device at all.
MOST_SPILLED = 160
SIZES = [
    (Cell.LSTM, 985, 4, 1), (Cell.LSTM, 256, 32, 2), (Cell.GRU, 985, 4, 1),
    (Cell.RNN_TANH, 600, 8, 2), (Cell.RNN_RELU, 30, 64, 1), (Cell.LSTM, 1150, 8, 1),
]  # fmt: skip
# A compilation takes half a second: two sizes for architectures on which nothing was measured.
ELSEWHERE = SIZES if "HFAI_LONG_TESTS" in os.environ else SIZES[:2]


def check(plan: Plan, architecture: str) -> None:
    limits = DEVICES[architecture]
    passes = (
        (True, programs.FORWARD, plan.forward_warps, plan.forward_shared_bytes),
        (False, programs.BACKWARD, plan.backward_warps, plan.backward_shared_bytes),
    )
    for forward, sources, warps, shared_bytes in passes:
        constants = plan.constants(forward=forward) | {"PATIENCE": programs.PATIENCE}
        constants |= {"SAVE": True} if forward else {}
        text = jit.program_text(sources, constants, {"T": TYPES[plan.precision]})
        (kernel,) = resources(text, architecture).values()
        full = kernel.registers >= MOST_REGISTERS[warps] - 2
        assert kernel.spilled <= (MOST_SPILLED if full else 0), (plan, kernel)
        assert kernel.registers <= MOST_REGISTERS[warps]
        assert kernel.shared + shared_bytes <= limits.shared_bytes_per_block


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize("precision", Precision)
def test_the_chosen_plans(architecture: str, precision: Precision) -> None:
    chosen = 0
    sizes = SIZES if architecture == "sm_90" else ELSEWHERE
    for cell, hidden, batch, directions in sizes:
        plan = dispatch.choose(cell, hidden, directions, batch, precision, DEVICES[architecture])
        if plan is not None:
            check(plan, architecture)
            chosen += 1
    assert chosen >= len(sizes) // 2


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_both_half_precision_types_and_inference(dtype: torch.dtype) -> None:
    plan = dispatch.choose(Cell.LSTM, 1024, 1, 8, Precision.HALF, DEVICES["sm_90"])
    assert plan is not None
    for save in (True, False):
        constants = plan.constants(forward=True) | {"SAVE": save, "PATIENCE": programs.PATIENCE}
        text = jit.program_text(programs.FORWARD, constants, {"T": dtype})
        (kernel,) = resources(text, "sm_90").values()
        assert kernel.spilled == 0
