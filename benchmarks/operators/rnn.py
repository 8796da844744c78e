"""RNN: torch and ours."""

from __future__ import annotations

from torch import nn

import hfai.nn
from benchmarks.operators.recurrent import Recurrent


class RNN(Recurrent):
    """`torch.nn.RNN` with as many inputs as hidden units."""

    name = "rnn"
    gates = 1
    torch_class = nn.RNN
    hfai_class = hfai.nn.RNN
