"""LSTM: torch and ours.

The cases beyond those of all recurrent layers are cuDNN's best: its persistent kernel is for fp16
and a hidden size that 128 divides, and large batches fill its matrix products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

import hfai.nn
from benchmarks.harness.case import Case
from benchmarks.operators.recurrent import Recurrent, recurrent_case


class LSTM(Recurrent):
    """`torch.nn.LSTM` with as many inputs as hidden units."""

    name = "lstm"
    gates = 4
    torch_class = nn.LSTM
    hfai_class = hfai.nn.LSTM

    def cases(self) -> Sequence[Case]:
        """Return the published table's cases."""
        return [
            *super().cases(),
            recurrent_case(1000, 8, 1024, torch.float16),
            recurrent_case(512, 64, 1024, torch.bfloat16),
        ]
