"""Lightning: a real Trainer goes through epochs, stops in the middle of one, and goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ffrecord.torch import DataLoader, GlobalBatchSampler
from tests.ffrecord.torch.sets import N, Numbers

lightning = pytest.importorskip("lightning.pytorch")
pytestmark = pytest.mark.filterwarnings("ignore")


class Seen(lightning.LightningModule):  # type: ignore[misc,name-defined]
    """Notes its batches; may save a checkpoint after some and stop."""

    def __init__(self, stop: int = -1, checkpoint: Path | None = None) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches: list[list[int]] = []
        self.stop, self.checkpoint = stop, checkpoint

    def training_step(self, batch: Any, number: int) -> Any:
        self.batches.append(batch.tolist())
        return self.layer(batch[:, None] / N).mean()

    def on_train_batch_end(self, *given: Any) -> None:
        if len(self.batches) == self.stop:
            self.trainer.save_checkpoint(self.checkpoint)
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(module: Seen, loader: DataLoader, directory: Path, **more: Any) -> list[list[int]]:
    trainer = lightning.Trainer(
        max_epochs=3,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=directory,
    )
    trainer.fit(module, loader, **more)
    return module.batches


def loader_of(parts: Path, workers: int) -> DataLoader:
    dataset = Numbers(parts)
    sampler = GlobalBatchSampler(dataset, 25, seed=1, tail="drop")
    return DataLoader(dataset, batch_sampler=sampler, num_workers=workers)


def test_a_loader_that_is_not_skippable_trains(parts: Path, tmp_path: Path) -> None:
    loader = DataLoader(Numbers(parts), 25, skippable=False, drop_last=True)
    batches = fit(Seen(), loader, tmp_path)
    assert batches == [list(range(start, start + 25)) for start in (0, 25, 50, 75)] * 3


@pytest.mark.parametrize("workers", [0, 2])
def test_every_epoch_has_all_its_batches_in_its_own_order(
    workers: int, parts: Path, tmp_path: Path
) -> None:
    batches = fit(Seen(), loader_of(parts, workers), tmp_path)
    expected = []
    for epoch in range(3):
        sampler = GlobalBatchSampler(N, 25, seed=1, tail="drop")
        sampler.set_epoch(epoch)
        expected += list(sampler)
    assert batches == expected


@pytest.mark.parametrize(("stop", "workers"), [(2, 0), (4, 0), (6, 0), (6, 2)])
def test_a_checkpoint_in_the_middle_of_an_epoch_goes_on_exactly(
    stop: int, workers: int, parts: Path, tmp_path: Path
) -> None:
    whole = fit(Seen(), loader_of(parts, 0), tmp_path)
    checkpoint = tmp_path / "c.ckpt"
    first = fit(Seen(stop, checkpoint), loader_of(parts, workers), tmp_path)
    assert first == whole[:stop]
    rest = fit(
        Seen(), loader_of(parts, workers), tmp_path, ckpt_path=checkpoint, weights_only=False
    )
    assert rest == whole[stop:]
