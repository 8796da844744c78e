"""The operators that `ops.py` measures: one line each."""

from __future__ import annotations

from benchmarks.harness.case import Operator
from benchmarks.operators.gru import GRU
from benchmarks.operators.gru_cell import GRUCell
from benchmarks.operators.layer_norm import LayerNorm
from benchmarks.operators.lstm import LSTM
from benchmarks.operators.lstm_cell import LSTMCell
from benchmarks.operators.mha import MHA
from benchmarks.operators.rms_norm import RMSNorm
from benchmarks.operators.rnn import RNN

OPERATORS: dict[str, type[Operator]] = {
    LayerNorm.name: LayerNorm,
    RMSNorm.name: RMSNorm,
    LSTM.name: LSTM,
    GRU.name: GRU,
    RNN.name: RNN,
    MHA.name: MHA,
    LSTMCell.name: LSTMCell,
    GRUCell.name: GRUCell,
}
