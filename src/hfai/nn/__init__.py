"""Drop-in operators, and the switch that puts them into a model and takes them out again.

    from hfai.nn import to_hfai, to_torch
    model = to_hfai(model)      # same parameters, same names, faster layers
    model = to_torch(model)     # plain torch again

Each class here is a subclass of torch's class of the same name and differs from it in `forward`
alone. What the fast path does not cover runs torch's own code.
"""

from hfai.nn.attention import MultiheadAttention
from hfai.nn.cells import GRUCell, LSTMCell, RNNCell
from hfai.nn.convert import to_hfai, to_torch
from hfai.nn.layer_norm import LayerNorm, RMSNorm
from hfai.nn.rnn import GRU, LSTM, RNN
from hfai.nn.transformer import (
    TransformerDecoderLayer,
    TransformerEncoder,
    TransformerEncoderLayer,
)

__all__ = [
    "GRU",
    "LSTM",
    "RNN",
    "GRUCell",
    "LSTMCell",
    "LayerNorm",
    "MultiheadAttention",
    "RMSNorm",
    "RNNCell",
    "TransformerDecoderLayer",
    "TransformerEncoder",
    "TransformerEncoderLayer",
    "to_hfai",
    "to_torch",
]
