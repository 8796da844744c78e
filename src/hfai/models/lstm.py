"""A byte-level LSTM language model: guess each next byte of a text from those before it.

Shapes: B sequences, L tokens each, E features of a token, H hidden units, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn import functional as F

from hfai.models.bert import IGNORED_LABEL


@dataclass(frozen=True)
class LSTMConfig:
    """The sizes of a language model.

    Attributes:
        vocab_size: V, the number of token ids.
        embedding_size: E, the number of features of a token.
        hidden_size: H, of every LSTM layer.
        layers: the number of LSTM layers.
        dropout: the probability used between layers, and before and after them.
    """

    vocab_size: int
    embedding_size: int = 128
    hidden_size: int = 512
    layers: int = 1
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("vocab_size", "embedding_size", "hidden_size", "layers"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")


class LMOutput(NamedTuple):
    """What `LSTMLM` returns.

    Attributes:
        loss: mean cross-entropy over the labels, in nats; None without labels.
        logits: [B, L, V].
    """

    loss: Tensor | None
    logits: Tensor


class LSTMLM(nn.Module):
    """Embedding, LSTM layers, and a linear map to the logits of the next token."""

    def __init__(self, config: LSTMConfig) -> None:
        """Make the model with torch's own initial weights."""
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocab_size, config.embedding_size)
        self.dropout = nn.Dropout(config.dropout)
        self.lstm = nn.LSTM(
            config.embedding_size,
            config.hidden_size,
            num_layers=config.layers,
            dropout=config.dropout if config.layers > 1 else 0.0,
            batch_first=True,
        )
        self.output = nn.Linear(config.hidden_size, config.vocab_size)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> LMOutput:
        """Guess what follows each token.

        Args:
            input_ids: int64 [B, L].
            labels: int64 [B, L], what follows each token; -100 where nothing is asked.
        """
        y, _ = self.lstm(self.dropout(self.embedding(input_ids)))
        logits = self.output(self.dropout(y))
        if labels is None:
            return LMOutput(None, logits)
        loss = F.cross_entropy(
            logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORED_LABEL
        )
        return LMOutput(loss, logits)


def lstm_LM(vocab_size: int, dropout: float = 0.0) -> LSTMLM:  # noqa: N802
    """Make a small one: E = 128, one layer of H = 512."""
    return LSTMLM(LSTMConfig(vocab_size, dropout=dropout))
