"""GRU: torch and ours."""

from __future__ import annotations

from torch import nn

import hfai.nn
from benchmarks.operators.recurrent import Recurrent


class GRU(Recurrent):
    """`torch.nn.GRU` with as many inputs as hidden units."""

    name = "gru"
    gates = 3
    torch_class = nn.GRU
    hfai_class = hfai.nn.GRU
