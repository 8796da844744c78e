"""The cells' source compiles for every architecture, without a GPU and without spilling."""

from __future__ import annotations

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.cell import programs
from hfai.kernels.rnn.plan import Cell
from tests.kernels.compiled import DEVICES, resources

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, which are for Linux")


@pytest.mark.parametrize("architecture", DEVICES)
@pytest.mark.parametrize(
    ("cell", "dtype"),
    [(Cell.LSTM, torch.float32), (Cell.GRU, torch.bfloat16), (Cell.RNN_RELU, torch.float16)],
)
def test_every_cell(architecture: str, cell: Cell, dtype: torch.dtype) -> None:
    text = jit.program_text(programs.SOURCES, programs.constants(cell, dtype), {"T": dtype})
    kernels = resources(text, architecture)
    assert set(kernels) == {"hfai_cell_forward", "hfai_cell_backward", "hfai_cell_add_sums"}
    for kernel in kernels.values():
        assert kernel.spilled == 0
        assert kernel.registers <= 128
