"""Batches of bytes and what to guess of them, from a record file of windows in a shuffled order.

Which windows a batch holds is a function of the seed and of its place in the epoch, and so is its
masking. A run that stops and resumes therefore sees the very batches of an unbroken one; all it
saves is that place. The masking is that of Devlin et al. 2018, section 3.1: 15 % of the positions
are predicted; 80 % of these are replaced by the mask token, 10 % by a random byte, and 10 % stay as
they are. A language model guesses each next byte instead (`following`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ffrecord.reader import Record
from ffrecord.torch import DataLoader, Dataset, GlobalBatchSampler
from hfai.demo.corpus import ByteArray
from hfai.models.bert import IGNORED_LABEL

MASK_TOKEN = 256
# 256 bytes and the mask, rounded up to a multiple of 8: tensor cores want the output matrix so.
VOCABULARY_SIZE = 264
PREDICTED_SHARE = 0.15
MASKED_SHARE = 0.8
RANDOM_SHARE = 0.1


class Batch(NamedTuple):
    """Bytes and what to guess: both int64 [batch, length], labels -100 where nothing is asked."""

    input_ids: Tensor
    labels: Tensor


Task: TypeAlias = Callable[[ByteArray, np.random.Generator], Batch]


class Batches:
    """An endless sequence of batches: every window once in an epoch, then another order.

    Iterating goes on behind the last batch that was handed out, in a new iterator too.

    Args:
        windows: a record file of windows of equal length.
        batch_size: windows in a batch; the last one of an epoch is filled from its start.
        seed: of the orders and the masking.
        task: makes a batch of windows, shape (batch, length), with a random generator.
    """

    def __init__(self, windows: Path, batch_size: int, seed: int, task: Task | None = None) -> None:
        dataset = Dataset(windows)
        self._seed = seed
        self._task = masked if task is None else task
        self._sampler = GlobalBatchSampler(dataset, batch_size, seed=seed, rank=0, world_size=1)
        self._loader = DataLoader(dataset, batch_sampler=self._sampler, collate_fn=_stacked)

    def __iter__(self) -> Iterator[Batch]:
        """Yield batches on the CPU, without end."""
        while True:
            for windows in self._loader:
                place = (self._seed, self._sampler.epoch, self._sampler.consumed)
                yield self._task(windows, np.random.default_rng(place))

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last batch that was handed out."""
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on at a place.

        Raises:
            ValueError: it is no place in these windows.
        """
        try:
            self._sampler.load_state_dict(state)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{state!r} is no place in an epoch") from error


def masked(windows: ByteArray, rng: np.random.Generator) -> Batch:
    """Mask windows, shape (batch, length), for prediction.

    Every window has the same number of predicted positions, `round(0.15 * length)` and at least
    one, so that no shape changes from step to step.
    """
    input_ids = windows.astype(np.int64)
    rows, length = input_ids.shape
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


def following(windows: ByteArray, rng: np.random.Generator) -> Batch:
    """Ask for the byte after each, but for a window's last; nothing here is random."""
    del rng
    input_ids = windows.astype(np.int64)
    labels = np.full_like(input_ids, IGNORED_LABEL)
    labels[:, :-1] = input_ids[:, 1:]
    return Batch(torch.from_numpy(input_ids), torch.from_numpy(labels))


def _stacked(records: list[Record]) -> ByteArray:
    return np.stack(records)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """Copy a batch to `device`; to a GPU from pinned memory, without waiting for the copy."""
    if device.type != "cuda":
        return Batch(*(tensor.to(device) for tensor in batch))
    return Batch(*(tensor.pin_memory().to(device, non_blocking=True) for tensor in batch))
