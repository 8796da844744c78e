"""A cell's own kernels on the CPU: compiled for the emulator, in place of what a GPU would run.

Device -1 is the host: `launch` and node.cpp are given functions that run the emulator with the same
grid and the same parameters that a launch would have.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch

from hfai.kernels.cell import programs
from hfai.kernels.cell.programs import Configuration
from hfai.kernels.rnn.plan import Cell
from tests.kernels.rnn.emulated import Emulated, emulated

Function = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.POINTER(ctypes.c_void_p))
PARAMETERS = {"hfai_cell_forward": 11, "hfai_cell_backward": 15, "hfai_cell_add_sums": 5}


@dataclass
class HostKernel:
    """What launch.py calls, and what node.cpp gets described."""

    run: Emulated
    block: int
    shared_bytes: int
    parameters: int
    launches: int = 0

    def __post_init__(self) -> None:
        self._function = Function(self._from_node)
        address = ctypes.cast(self._function, ctypes.c_void_p).value
        self.description = (address, -1, self.block, self.shared_bytes, 1, 0)

    def launch(self, grid: int, stream: int, *arguments: int) -> None:
        assert len(arguments) == self.parameters
        self.launches += 1
        assert self.run(grid, self.block, self.shared_bytes, *arguments)

    def _from_node(self, grid: int, parameters: Any) -> None:
        values = [ctypes.c_uint64.from_address(parameters[i]).value for i in range(self.parameters)]
        self.launch(grid, 0, *values)


class HostConfiguration(Configuration):
    """A configuration whose kernels run on the emulator."""

    def __init__(self, cell: Cell, dtype: torch.dtype) -> None:
        super().__init__(cell, dtype, -1)

    def _load(  # type: ignore[override]
        self, name: str, block: int, shared_bytes: int = 0
    ) -> HostKernel:
        constants = programs.constants(self.cell, self.dtype)
        run = emulated(programs.SOURCES, constants, self.dtype, name)
        return HostKernel(run, block, shared_bytes, PARAMETERS[name])
