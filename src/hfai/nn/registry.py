"""Which torch class is replaced by which of ours: the one place that knows.

A new operator is one line in `OPERATORS`. Its class subclasses the torch class, adds no instance
state (conversion changes `__class__` and nothing else) and says in `explain_path` which way its
calls go.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from torch import nn

from hfai.nn.attention import MultiheadAttention
from hfai.nn.cells import GRUCell, LSTMCell, RNNCell
from hfai.nn.layer_norm import LayerNorm, RMSNorm
from hfai.nn.path import Path
from hfai.nn.rnn import GRU, LSTM, RNN
from hfai.nn.transformer import (
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

OPERATORS: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: LayerNorm,
    nn.RMSNorm: RMSNorm,
    nn.LSTM: LSTM,
    nn.GRU: GRU,
    nn.RNN: RNN,
    nn.MultiheadAttention: MultiheadAttention,
    nn.TransformerEncoderLayer: TransformerEncoderLayer,
    nn.TransformerDecoderLayer: TransformerDecoderLayer,
    nn.TransformerEncoder: TransformerEncoder,
    nn.LSTMCell: LSTMCell,
    nn.GRUCell: GRUCell,
    nn.RNNCell: RNNCell,
}

# Layers that compute with their parts' parameters and never call those parts.
WHOLE = (nn.MultiheadAttention,)

TORCH_CLASS = {hfai_class: torch_class for torch_class, hfai_class in OPERATORS.items()}


@runtime_checkable
class Explains(Protocol):
    """A layer that can say which path its calls take; every class in `OPERATORS` is one."""

    def explain_path(self) -> Path:
        """Return the path for the parameters as they are now, on the device they are on."""
