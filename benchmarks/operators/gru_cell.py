"""GRUCell: torch and ours."""

from __future__ import annotations

from torch import nn

import hfai.nn
from benchmarks.operators.cell import CellStep


class GRUCell(CellStep):
    """`torch.nn.GRUCell` with as many inputs as hidden units."""

    name = "gru_cell"
    gates = 3
    states = ("h",)
    torch_class = nn.GRUCell
    hfai_class = hfai.nn.GRUCell
