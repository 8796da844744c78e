"""torch against hfai: the same work in turn, on weights that stay as they are."""

from __future__ import annotations

import pytest
import torch

from hfai.demo.batches import Batch
from hfai.demo.compare import PAIRS, compare, steps_per_block
from hfai.demo.interrupt import StopRequest
from hfai.demo.progress import Progress
from hfai.demo.train import Trainer


def test_both_sides_are_measured_alike_and_agree(
    trainer: Trainer, on_device: list[Batch], progress: Progress, device: torch.device
) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    layers = [type(module) for module in trainer.model.modules()]
    result = compare(trainer, on_device, on_device[:2], 0.2, StopRequest(), progress)
    assert result is not None
    for side in (result.torch, result.hfai):
        assert len(side.tokens_per_second) == PAIRS
        assert min(side.tokens_per_second) > 0
        assert (side.peak_memory is not None) == (device.type == "cuda")
    assert result.torch.loss == pytest.approx(result.hfai.loss, rel=1e-4)
    assert min(result.ratios) <= result.ratio <= max(result.ratios)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(before[name], tensor), name
    assert [type(module) for module in trainer.model.modules()] == layers


def test_all_blocks_together_take_the_time_there_is() -> None:
    assert steps_per_block(seconds=15.0, step_seconds=0.05) * 2 * PAIRS * 0.05 == 15.0
    assert steps_per_block(seconds=1.0, step_seconds=20.0) == 1


def test_a_stop_before_the_first_pair_leaves_no_comparison(
    trainer: Trainer, on_device: list[Batch], progress: Progress
) -> None:
    stop = StopRequest()
    stop.requested = True
    assert compare(trainer, on_device, on_device, 1.0, stop, progress) is None
