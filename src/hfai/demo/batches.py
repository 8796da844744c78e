"""Masked batches of bytes, each a function of the seed and the step alone.

A run that stops and resumes therefore sees the very batches of an unbroken one, with no state to
save. The masking is that of Devlin et al. 2018, section 3.1: 15 % of the positions are predicted;
80 % of these are replaced by the mask token, 10 % by a random byte, and 10 % stay as they are.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from hfai.demo.corpus import ByteArray
from hfai.models.bert import IGNORED_LABEL

MASK_TOKEN = 256
# 256 bytes and the mask, rounded up to a multiple of 8: tensor cores want the output matrix so.
VOCABULARY_SIZE = 264
PREDICTED_SHARE = 0.15
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


class Batch(NamedTuple):
    """Masked bytes and what they were: both int64 [batch, length], labels -100 where not asked."""

    input_ids: Tensor
    labels: Tensor


class Batches:
    """An endless sequence of masked batches over a corpus, indexed by step."""

    def __init__(self, corpus: ByteArray, batch_size: int, length: int, seed: int) -> None:
        """Take windows of `length` bytes from `corpus`.

        Raises:
            ValueError: the corpus is shorter than one window.
        """
        if length > len(corpus):
            raise ValueError(
                f"a length of {length:,} bytes was asked for, but the text has {len(corpus):,}"
            )
        self._corpus = corpus
        self._batch_size = batch_size
        self._length = length
        self._seed = seed

    def __getitem__(self, step: int) -> Batch:
        """Make the batch of a step, on the CPU.

        Every window has the same number of predicted positions, `round(0.15 * length)` and at least
        one, so that no shape changes from step to step.
        """
        rng = np.random.default_rng((self._seed, step))
        rows, length = self._batch_size, self._length
        starts = rng.integers(0, len(self._corpus) - length + 1, size=(rows, 1))
        input_ids = self._corpus[starts + np.arange(length)].astype(np.int64)

        predicted = max(1, round(PREDICTED_SHARE * length))
        order = rng.random((rows, length), dtype=np.float32)
        columns = np.argpartition(order, predicted - 1, axis=1)[:, :predicted]
        original = np.take_along_axis(input_ids, columns, axis=1)
        labels = np.full_like(input_ids, IGNORED_LABEL)
        np.put_along_axis(labels, columns, original, axis=1)

        fate = rng.random((rows, predicted))
        random_bytes = rng.integers(0, 256, size=(rows, predicted))
        replacement = np.where(fate < MASKED_SHARE, MASK_TOKEN, random_bytes)
        replacement = np.where(fate < MASKED_SHARE + RANDOM_SHARE, replacement, original)
        np.put_along_axis(input_ids, columns, replacement, axis=1)
        return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels))


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to `device`; to a GPU from pinned memory, without waiting for the copy."""
    if device.type != "cuda":
        return Batch(*(tensor.to(device) for tensor in batch))
    return Batch(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch))
