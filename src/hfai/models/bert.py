"""BERT for masked language modelling, built from torch's own transformer layers.

The architecture is that of Devlin et al., "BERT: Pre-training of Deep Bidirectional Transformers
for Language Understanding" (2018, arXiv:1810.04805): token and position embeddings, post-norm
transformer layers, and a head that shares its output matrix with the token embedding. Two things of
the paper are left out: segment embeddings and next-sentence prediction. With one segment the former
are a constant that the position embeddings absorb; RoBERTa (2019, arXiv:1907.11692) showed that
pre-training does without the latter.

Shapes: B sequences, L tokens each (L <= max_length), H features, V the vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

IGNORED_LABEL = -100  # torch's own default for `ignore_index`


@dataclass(frozen=True)
class BertConfig:
    """The sizes of a BERT; the defaults are those of BERT-base, without its vocabulary.

    Attributes:
        vocab_size: V, the number of token ids.
        max_length: the longest L that the position embeddings allow.
        layers: the number of transformer layers.
        hidden_size: H, the number of features of a token.
        heads: attention heads; they share H evenly.
        feed_forward_size: the width between the two linear maps of a layer.
        dropout: the probability used on embeddings, attention and both residual branches.
        layer_norm_epsilon: added to the variance in every LayerNorm.
        initializer_std: the standard deviation of the normal distribution of new weights.
    """

    vocab_size: int
    max_length: int
    layers: int = 12
    hidden_size: int = 768
    heads: int = 12
    feed_forward_size: int = 3072
    dropout: float = 0.1
    layer_norm_epsilon: float = 1e-12
    initializer_std: float = 0.02

    def __post_init__(self) -> None:
        for name in ("vocab_size", "max_length", "layers", "hidden_size", "heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.hidden_size % self.heads:
            raise ValueError(
                f"hidden_size must be a multiple of heads, but {self.hidden_size} is not one of "
                f"{self.heads}"
            )


class MLMOutput(NamedTuple):
    """What `BertMLM` returns.

    Attributes:
        loss: a scalar, or None where no labels were given.
        logits: without labels [B, L, V]; with labels [N, V], one row for each of the N labelled
            positions, in the order of `labels[labels != -100]`.
    """

    loss: Tensor | None
    logits: Tensor


def bert_layer(config: BertConfig) -> nn.TransformerEncoderLayer:
    """Make one post-norm transformer layer, [B, L, H] to [B, L, H]: torch's own."""
    layer = nn.TransformerEncoderLayer(
        config.hidden_size,
        config.heads,
        config.feed_forward_size,
        config.dropout,
        activation=nn.GELU(),
        layer_norm_eps=config.layer_norm_epsilon,
        batch_first=True,
    )
    layer.dropout.p = 0.0  # BERT has none between its two linear maps
    return layer


class BertMLM(nn.Module):
    """BERT with its masked language modelling head."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden, epsilon = config.hidden_size, config.layer_norm_epsilon
        self.config = config
        self.token_embedding = nn.Embedding(config.vocab_size, hidden)
        self.position_embedding = nn.Embedding(config.max_length, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, eps=epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(bert_layer(config) for _ in range(config.layers))
        self.head = nn.Linear(hidden, hidden)
        self.head_activation = nn.GELU()
        self.head_norm = nn.LayerNorm(hidden, eps=epsilon)
        # The output matrix is token_embedding.weight itself rather than a second name for it, so
        # that the state dict holds it once and nothing can untie the two.
        self.output_bias = nn.Parameter(torch.zeros(config.vocab_size))
        self.apply(self._initialise)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
    ) -> MLMOutput:
        """Predict tokens and, where labels are given, the loss of the predictions.

        With labels only the labelled positions go through the head and the output matrix. At 15 %
        of the positions that saves most of the largest tensors of the step (at B = 32, L = 512,
        V = 30522 the fp32 logits alone would take 1.9 GiB). Finding the positions makes the host
        wait for the device once a call. Call without labels for the logits of all positions.

        Args:
            input_ids: integers [B, L] in 0..V-1.
            attention_mask: [B, L], bool or integer; 1 attends, 0 is padding. None attends to all.
            labels: integers [B, L]; -100 is ignored.

        Returns:
            The loss, in nats, as the mean cross-entropy over the labelled positions (0 where there
            is none), computed in fp32; and the logits, whose shape `MLMOutput` describes.

        Raises:
            ValueError: `input_ids` is not [B, L] with L <= max_length, or a mask or labels of
                another shape.
        """
        self._check_shapes(input_ids, attention_mask, labels)
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.token_embedding(input_ids) + self.position_embedding(positions)
        x = self.dropout(self.embedding_norm(x))
        padding = None if attention_mask is None else attention_mask == 0
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        if labels is None:
            return MLMOutput(None, self._logits(x))

        flat_labels = labels.flatten()
        labelled = (flat_labels != IGNORED_LABEL).nonzero().squeeze(1)
        logits = self._logits(x.flatten(0, 1).index_select(0, labelled))
        targets = flat_labels.index_select(0, labelled).long()
        total = F.cross_entropy(logits.float(), targets, reduction="sum")
        return MLMOutput(total / max(1, targets.numel()), logits)

    def _logits(self, x: Tensor) -> Tensor:
        x = self.head_norm(self.head_activation(self.head(x)))
        return F.linear(x, self.token_embedding.weight, self.output_bias)

    def _initialise(self, module: nn.Module) -> None:
        std = self.config.initializer_std
        if isinstance(module, nn.MultiheadAttention):
            nn.init.normal_(module.in_proj_weight, std=std)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=std)
            nn.init.zeros_(module.bias)

    def _check_shapes(
        self, input_ids: Tensor, attention_mask: Tensor | None, labels: Tensor | None
    ) -> None:
        shape = tuple(input_ids.shape)
        if len(shape) != 2 or shape[1] > self.config.max_length:
            raise ValueError(
                f"input_ids must be [batch, length] with length at most max_length = "
                f"{self.config.max_length}, not {list(shape)}"
            )
        for name, tensor in (("attention_mask", attention_mask), ("labels", labels)):
            if tensor is not None and tuple(tensor.shape) != shape:
                raise ValueError(
                    f"{name} must have the shape of input_ids, {list(shape)}, "
                    f"not {list(tensor.shape)}"
                )


def bert_tiny_MLM(vocab_size: int, max_length: int, dropout: float = 0.1) -> BertMLM:  # noqa: N802
    """Make the smallest BERT: 2 layers, H = 128, 2 heads (Turc et al. 2019, arXiv:1908.08962)."""
    return BertMLM(
        BertConfig(
            vocab_size,
            max_length,
            layers=2,
            hidden_size=128,
            heads=2,
            feed_forward_size=512,
            dropout=dropout,
        )
    )


def bert_base_MLM(vocab_size: int, max_length: int, dropout: float = 0.1) -> BertMLM:  # noqa: N802
    """Make BERT-base: 12 layers, H = 768, 12 heads (Devlin et al. 2018, section 3)."""
    return BertMLM(BertConfig(vocab_size, max_length, dropout=dropout))


def bert_large_MLM(vocab_size: int, max_length: int, dropout: float = 0.1) -> BertMLM:  # noqa: N802
    """Make BERT-large: 24 layers, H = 1024, 16 heads (Devlin et al. 2018, section 3)."""
    return BertMLM(
        BertConfig(
            vocab_size,
            max_length,
            layers=24,
            hidden_size=1024,
            heads=16,
            feed_forward_size=4096,
            dropout=dropout,
        )
    )
