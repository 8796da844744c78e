"""The way back to torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from hfai.demo.batches import Batch
from hfai.demo.check import RoundTrip, check_round_trip
from hfai.demo.settings import Settings
from hfai.demo.train import Trainer


def test_what_was_trained_loads_strictly_into_plain_torch(
    trainer: Trainer, settings: Settings, on_device: list[Batch], tmp_path: Path
) -> None:
    trainer.step(on_device[0], 1e-3)
    trip = check_round_trip(trainer, on_device, tmp_path / "model.pt")
    assert trip.passed
    assert trip.loaded_loss == trainer.evaluate(on_device)
    assert all(not type(m).__module__.startswith("hfai.nn") for m in trainer.model.modules())
    state = torch.load(tmp_path / "model.pt", weights_only=True)
    settings.make_model().load_state_dict(state, strict=True)


def test_a_difference_in_the_last_bit_fails() -> None:
    assert not RoundTrip(2.0, 2.0000000000000004).passed
    assert not RoundTrip(float("nan"), float("nan")).passed


def test_a_model_with_other_names_is_an_error(
    trainer: Trainer, on_device: list[Batch], tmp_path: Path
) -> None:
    trainer.model.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"extra\.weight"):
        check_round_trip(trainer, on_device, tmp_path / "model.pt")


def test_a_layer_that_is_not_torchs_is_an_error(
    trainer: Trainer, on_device: list[Batch], tmp_path: Path
) -> None:
    class MyNorm(nn.LayerNorm):
        pass

    trainer.model.embedding_norm.__class__ = MyNorm
    with pytest.raises(RuntimeError, match=r"embedding_norm is a .*MyNorm after to_torch"):
        check_round_trip(trainer, on_device, tmp_path / "model.pt")
