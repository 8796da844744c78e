"""Masked batches: each window once in an epoch, resumed exactly, with the published proportions."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from ffrecord import FileReader
from hfai.demo.batches import (
    MASK_TOKEN,
    VOCABULARY_SIZE,
    Batch,
    Batches,
    following,
    masked,
    to_device,
)
from hfai.demo.corpus import ByteArray, write_windows


def rows(text: ByteArray, count: int, length: int) -> ByteArray:
    return text[: count * length].reshape(count, length)


def original(batch: Batch) -> torch.Tensor:
    return torch.where(batch.labels == -100, batch.input_ids, batch.labels)


def same(first: Batch, second: Batch) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_equal_seeds_give_equal_batches_and_others_do_not(windows: Path) -> None:
    first, again, other = (list(islice(Batches(windows, 4, seed), 3)) for seed in (7, 7, 8))
    assert all(map(same, first, again))
    assert not any(map(same, first, other))
    assert not same(first[0], first[1])


def test_an_epoch_reads_every_window_once_and_the_next_in_another_order(windows: Path) -> None:
    with FileReader(windows) as reader:
        whole = sorted(record.tobytes() for record in reader)
    batches = Batches(windows, 100, seed=0)
    steps = -(-len(whole) // 100)
    epochs = []
    stream = iter(batches)
    for epoch in range(2):
        found = torch.cat([original(batch) for batch in islice(stream, steps)])
        assert batches.state_dict()["epoch"] == epoch
        epochs.append([bytes(row) for row in found[: len(whole)].tolist()])
    assert [sorted(epoch) for epoch in epochs] == [whole, whole]
    assert epochs[0] != epochs[1]


@pytest.mark.parametrize("taken", [0, 1, 7, 8, 9, 17])
def test_a_new_stream_goes_on_anywhere_in_an_epoch_bit_for_bit(windows: Path, taken: int) -> None:
    with FileReader(windows) as reader:
        size = -(-reader.n // 8)  # eight batches an epoch
    unbroken = list(islice(Batches(windows, size, seed=1), 24))
    stopped = Batches(windows, size, seed=1)
    assert all(map(same, list(islice(stopped, taken)), unbroken))
    resumed = Batches(windows, size, seed=1)
    resumed.load_state_dict(stopped.state_dict())
    assert all(map(same, islice(resumed, 24 - taken), unbroken[taken:]))


@pytest.mark.parametrize("place", [{}, {"n": "x"}, None, {"version": 1, "n": 3, "consumed": 0}])
def test_a_place_elsewhere_is_refused(batches: Batches, place: object) -> None:
    with pytest.raises(ValueError, match=r"no place in an epoch|records"):
        batches.load_state_dict(place)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "predicted"), [(8, 1), (64, 10), (100, 15), (512, 77)])
def test_every_window_has_the_same_number_of_predictions(
    text: ByteArray, length: int, predicted: int
) -> None:
    labels = masked(rows(text, 8, length), np.random.default_rng(0)).labels
    assert (labels != -100).sum(dim=1).tolist() == [predicted] * 8


def test_proportions_of_mask_random_and_kept(text: ByteArray) -> None:
    batch = masked(np.resize(text, (512, 200)), np.random.default_rng(0))
    predicted = batch.labels != -100
    inputs, labels = batch.input_ids[predicted], batch.labels[predicted]
    assert (inputs == MASK_TOKEN).float().mean().item() == pytest.approx(0.8, abs=0.02)
    assert (inputs == labels).float().mean().item() == pytest.approx(0.1 + 0.1 / 256, abs=0.02)
    replaced = inputs[(inputs != MASK_TOKEN) & (inputs != labels)]
    assert len(replaced.unique()) > 200  # any byte, not only those of the text


def test_positions_are_spread_evenly(text: ByteArray) -> None:
    rng = np.random.default_rng(1)
    windows = np.resize(text, (512, 20))
    counts = sum((masked(windows, rng).labels != -100).sum(dim=0) for _ in range(10))
    assert isinstance(counts, torch.Tensor)
    np.testing.assert_allclose(counts.numpy() / 5120, 0.15, atol=0.025)


def test_a_language_model_is_asked_for_the_next_byte(text: ByteArray) -> None:
    windows = rows(text, 3, 8)
    batch = following(windows, np.random.default_rng(0))
    assert batch.input_ids.tolist() == windows.tolist()
    assert batch.labels[:, :-1].tolist() == windows[:, 1:].tolist()
    assert (batch.labels[:, -1] == -100).all()


def test_tokens_fit_the_vocabulary_and_the_tensor_cores(batches: Batches) -> None:
    batch = next(iter(batches))
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.min() >= 0
    assert batch.input_ids.max() < VOCABULARY_SIZE
    assert VOCABULARY_SIZE % 8 == 0


def test_one_window_fills_any_batch(text: ByteArray, tmp_path: Path) -> None:
    write_windows(tmp_path / "one.ffr", text, len(text), "digest")
    batch = next(iter(Batches(tmp_path / "one.ffr", 2, seed=0)))
    assert torch.equal(original(batch), torch.from_numpy(np.stack([text, text])).long())


def test_a_copy_on_the_device_is_the_same(batches: Batches, device: torch.device) -> None:
    batch = next(iter(batches))
    copy = to_device(batch, device)
    assert copy.input_ids.device.type == device.type
    assert torch.equal(copy.input_ids.cpu(), batch.input_ids)
    assert torch.equal(copy.labels.cpu(), batch.labels)
