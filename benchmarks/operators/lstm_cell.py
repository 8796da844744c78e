"""LSTMCell: torch and ours."""

from __future__ import annotations

from torch import nn

import hfai.nn
from benchmarks.operators.cell import CellStep


class LSTMCell(CellStep):
    """`torch.nn.LSTMCell` with as many inputs as hidden units."""

    name = "lstm_cell"
    gates = 4
    states = ("h", "c")
    torch_class = nn.LSTMCell
    hfai_class = hfai.nn.LSTMCell
