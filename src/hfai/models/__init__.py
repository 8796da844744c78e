"""Reference models, made of the layers that `hfai.nn.to_hfai` swaps.

    from hfai.models import bert_large_MLM
    model = to_hfai(bert_large_MLM(vocab_size=30522, max_length=512)).cuda()

They are plain `torch.nn` modules: nothing in them needs hfai to train, save or load.
"""

from hfai.models.bert import (
    BertConfig,
    BertMLM,
    MLMOutput,
    bert_base_MLM,
    bert_large_MLM,
    bert_tiny_MLM,
)
from hfai.models.lstm import LSTMLM, LMOutput, LSTMConfig, lstm_LM

__all__ = [
    "LSTMLM",
    "BertConfig",
    "BertMLM",
    "LMOutput",
    "LSTMConfig",
    "MLMOutput",
    "bert_base_MLM",
    "bert_large_MLM",
    "bert_tiny_MLM",
    "lstm_LM",
]
