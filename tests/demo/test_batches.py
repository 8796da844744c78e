"""Masked batches: a function of seed and step, with the published proportions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hfai.demo.batches import MASK_TOKEN, VOCABULARY_SIZE, Batches, to_device
from hfai.demo.corpus import ByteArray


def test_a_batch_depends_on_seed_and_step_alone(text: ByteArray) -> None:
    first = Batches(text, 4, 32, seed=7)
    backwards = {step: first[step] for step in (5, 3, 1)}
    again = Batches(text.copy(), 4, 32, seed=7)
    for step in (1, 3, 5):
        assert torch.equal(again[step].input_ids, backwards[step].input_ids)
        assert torch.equal(again[step].labels, backwards[step].labels)
    assert not torch.equal(first[1].input_ids, first[3].input_ids)
    assert not torch.equal(first[1].input_ids, Batches(text, 4, 32, seed=8)[1].input_ids)


def test_unmasked_and_labels_together_are_windows_of_the_text(text: ByteArray) -> None:
    batch = Batches(text, 16, 24, seed=0)[0]
    original = torch.where(batch.labels == -100, batch.input_ids, batch.labels)
    content = text.tobytes()
    for row in original.tolist():
        assert bytes(row) in content


@pytest.mark.parametrize(("length", "predicted"), [(8, 1), (64, 10), (100, 15), (512, 77)])
def test_every_window_has_the_same_number_of_predictions(
    text: ByteArray, length: int, predicted: int
) -> None:
    labels = Batches(text, 8, length, seed=0)[0].labels
    assert (labels != -100).sum(dim=1).tolist() == [predicted] * 8


def test_proportions_of_mask_random_and_kept(text: ByteArray) -> None:
    batch = Batches(text, 512, 200, seed=0)[0]
    predicted = batch.labels != -100
    inputs, labels = batch.input_ids[predicted], batch.labels[predicted]
    masked = (inputs == MASK_TOKEN).float().mean().item()
    kept = (inputs == labels).float().mean().item()
    assert masked == pytest.approx(0.8, abs=0.02)
    assert kept == pytest.approx(0.1 + 0.1 / 256, abs=0.02)
    replaced = inputs[(inputs != MASK_TOKEN) & (inputs != labels)]
    assert len(replaced.unique()) > 200  # any byte, not only those of the text


def test_positions_are_spread_evenly(text: ByteArray) -> None:
    batches = Batches(text, 512, 20, seed=1)
    counts = sum((batches[step].labels != -100).sum(dim=0) for step in range(10))
    assert isinstance(counts, torch.Tensor)
    np.testing.assert_allclose(counts.numpy() / 5120, 0.15, atol=0.025)


def test_tokens_fit_the_vocabulary_and_the_tensor_cores(text: ByteArray) -> None:
    batch = Batches(text, 64, 64, seed=0)[0]
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.min() >= 0
    assert batch.input_ids.max() < VOCABULARY_SIZE
    assert VOCABULARY_SIZE % 8 == 0


def test_the_whole_text_can_be_one_window(text: ByteArray) -> None:
    assert Batches(text, 2, len(text), seed=0)[0].input_ids.shape == (2, len(text))


def test_a_text_shorter_than_a_window_is_refused(text: ByteArray) -> None:
    with pytest.raises(ValueError, match=r"a length of 64 bytes was asked for.*has 10"):
        Batches(text[:10], 1, 64, seed=0)


def test_a_copy_on_the_device_is_the_same(text: ByteArray, device: torch.device) -> None:
    batch = Batches(text, 4, 16, seed=0)[0]
    copy = to_device(batch, device)
    assert copy.input_ids.device.type == device.type
    assert torch.equal(copy.input_ids.cpu(), batch.input_ids)
    assert torch.equal(copy.labels.cpu(), batch.labels)
