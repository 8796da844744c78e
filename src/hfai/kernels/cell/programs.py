"""The compiled kernels of a cell: one program for each cell, type and device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

import torch
from torch import Tensor

from hfai.kernels import jit
from hfai.kernels.rnn.plan import Cell, Precision

SOURCES = ["tensor_cores.cuh", "rnn/cells.cuh", "cell/cell.cu"]
# As in cell.cu.
UNITS = 32
ROW_LANES = 32
GROUP_ROWS = 64
THREADS = 256


def constants(cell: Cell, dtype: torch.dtype) -> dict[str, int | bool]:
    """Return what the sources take by these names; fp32 gets the accurate functions."""
    precision = Precision.SPLIT if dtype is torch.float32 else Precision.HALF
    return {
        "CELL": int(cell),
        "UNITS": UNITS,
        "SPLIT": int(Precision.SPLIT),
        "PRECISION": int(precision),
    }


Run: TypeAlias = Callable[..., "tuple[Tensor, ...] | None"]


@dataclass(eq=False)
class Configuration:
    """All that fixes which kernels a call takes, and those kernels once they were needed."""

    cell: Cell
    dtype: torch.dtype
    device: int
    run: Run = field(init=False, repr=False)
    """(x, h, c, w_ih, w_hh, b_ih, b_hh) -> (h,) or (h, c) after the step, differentiably: that of
    autograd.py or node.cpp. It returns None where a tensor does not fit: the call is torch's."""

    @cached_property
    def forward(self) -> jit.Kernel:
        """The kernel behind the products."""
        return self._load("hfai_cell_forward", THREADS)

    @cached_property
    def backward(self) -> jit.Kernel:
        """The kernel of the gates' gradients and the biases' partial sums."""
        block = UNITS * ROW_LANES
        return self._load("hfai_cell_backward", block, 4 * block * self.cell.kept)

    @cached_property
    def add_sums(self) -> jit.Kernel:
        """The kernel that adds the partial sums up."""
        return self._load("hfai_cell_add_sums", THREADS)

    def _load(self, name: str, block: int, shared_bytes: int = 0) -> jit.Kernel:
        text = jit.program_text(SOURCES, constants(self.cell, self.dtype), {"T": self.dtype})
        return jit.load(text, name, self.device, block=block, shared_bytes=shared_bytes)
