"""Training: the schedule, the step, the loop and when it stops."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hfai.demo.batches import Batch, Batches
from hfai.demo.interrupt import StopRequest
from hfai.demo.progress import Progress
from hfai.demo.settings import Settings
from hfai.demo.train import Course, DivergenceError, Trainer, learning_rate, train
from hfai.nn import to_hfai


def run(trainer: Trainer, batches: Batches, losses: list[float], progress: Progress) -> None:
    course = Course(losses, batches.state_dict())
    train(trainer, batches, course, StopRequest(), progress, lambda: None, save_every=1e9)


def test_the_rate_rises_over_a_tenth_of_the_steps_and_falls_after(settings: Settings) -> None:
    hundred = replace(settings, steps=100, learning_rate=1.0)
    rates = [learning_rate(hundred, step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * step for step in range(1, 11)])
    assert rates[10] == 1.0
    assert rates[10:] == sorted(rates[10:], reverse=True)
    assert rates[99] == pytest.approx(1 / 90)


@pytest.mark.parametrize("steps", [1, 2, 3, 9])
def test_short_runs_have_usable_rates(settings: Settings, steps: int) -> None:
    short = replace(settings, steps=steps, learning_rate=1.0)
    assert all(0 < learning_rate(short, step) <= 1 for step in range(steps))


def test_training_does_every_step_and_lowers_the_loss(
    trainer: Trainer, settings: Settings, batches: Batches, progress: Progress
) -> None:
    trainer.settings = replace(settings, steps=40, learning_rate=5e-3)
    losses: list[float] = []
    run(trainer, batches, losses, progress)
    assert len(losses) == 40
    assert losses[0] == pytest.approx(5.58, abs=0.2)
    assert sum(losses[-5:]) / 5 < 3.5


def test_the_lstm_learns_what_follows(
    settings: Settings, windows: Path, device: torch.device, progress: Progress
) -> None:
    settings = replace(settings, model="lstm", steps=40, learning_rate=5e-3)
    torch.manual_seed(settings.seed)
    trainer = Trainer(to_hfai(settings.make_model().to(device)), settings, device)
    losses: list[float] = []
    batches = Batches(windows, settings.batch_size, settings.seed, settings.task)
    run(trainer, batches, losses, progress)
    assert losses[0] == pytest.approx(5.58, abs=0.2)
    assert sum(losses[-5:]) / 5 < 2.5


@pytest.mark.parametrize("device", [torch.device("cpu")])
def test_training_in_two_parts_is_training_in_one(
    make_trainer: Callable[[], Trainer], windows: Path, settings: Settings, progress: Progress
) -> None:
    def new_batches() -> Batches:
        return Batches(windows, settings.batch_size, settings.seed)

    unbroken: list[float] = []
    run(make_trainer(), new_batches(), unbroken, progress)
    trainer = make_trainer()
    course = Course([], new_batches().state_dict())
    stop = StopRequest()

    def stop_after_two() -> None:
        stop.requested = len(course.losses) == 2

    train(trainer, new_batches(), course, stop, progress, stop_after_two, save_every=0.0)
    assert len(course.losses) == 2
    assert course.place["consumed"] == 2 * settings.batch_size  # not what was read ahead
    resumed = new_batches()
    resumed.load_state_dict(course.place)
    run(trainer, resumed, course.losses, progress)
    assert course.losses == unbroken


def test_a_finished_training_does_nothing(
    trainer: Trainer, settings: Settings, batches: Batches, progress: Progress
) -> None:
    losses = [1.0] * settings.steps
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    run(trainer, batches, losses, progress)
    assert len(losses) == settings.steps
    assert all(torch.equal(before[name], t) for name, t in trainer.model.state_dict().items())


def test_a_loss_that_is_not_finite_ends_it_in_words(
    trainer: Trainer, batches: Batches, progress: Progress
) -> None:
    with torch.no_grad():
        trainer.model.output_bias.fill_(float("nan"))
    losses: list[float] = []
    with pytest.raises(DivergenceError, match=r"loss of step 1 is nan.*lower --learning-rate"):
        run(trainer, batches, losses, progress)
    assert len(losses) == 1


def test_a_rate_of_zero_leaves_every_weight_alone(trainer: Trainer, on_device: list[Batch]) -> None:
    before = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    for batch in on_device:
        trainer.step(batch, learning_rate=0.0)
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(before[name], tensor), name


def test_only_matrices_decay(trainer: Trainer) -> None:
    matrices, vectors = trainer.optimizer.param_groups
    assert matrices["weight_decay"] > 0
    assert vectors["weight_decay"] == 0
    assert all(parameter.ndim == 1 for parameter in vectors["params"])
    count = len(matrices["params"]) + len(vectors["params"])
    assert count == len(list(trainer.model.parameters()))


def test_bf16_means_autocast_over_fp32_parameters(
    trainer: Trainer, settings: Settings, on_device: list[Batch]
) -> None:
    exact = trainer.evaluate(on_device)
    trainer.settings = replace(settings, precision="bf16")
    assert trainer.evaluate(on_device) == pytest.approx(exact, rel=0.02)
    assert trainer.evaluate(on_device) != exact
    loss = trainer.step(on_device[0], 1e-3)
    assert loss.dtype == torch.float32
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())


def test_evaluation_is_the_mean_and_leaves_the_mode_alone(
    trainer: Trainer, on_device: list[Batch]
) -> None:
    separately = [trainer.evaluate([batch]) for batch in on_device]
    assert trainer.evaluate(on_device) == pytest.approx(sum(separately) / len(separately))
    assert trainer.model.training
    trainer.model.eval()
    trainer.evaluate(on_device)
    assert not trainer.model.training
