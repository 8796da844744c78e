"""One training step, the loop over them, and the loss on held-out text."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hfai.demo.batches import Batch, Batches, to_device
from hfai.demo.progress import Progress
from hfai.demo.settings import Settings
from hfai.demo.team import Share, Stop, Team
from hfai.models import LSTMLM, BertMLM

WARM_UP_SHARE = 0.1
BETAS = (0.9, 0.98)
WEIGHT_DECAY = 0.01
LARGEST_GRADIENT_NORM = 1.0


class DivergenceError(ArithmeticError):
    """The loss is no longer a finite number."""


@dataclass
class Course:
    """How far a training has come: with weights and optimizer, all that going on needs.

    Attributes:
        losses: one for each step done.
        place: of the batches, behind that of the last step.
    """

    losses: list[float]
    place: dict[str, Any]


class Trainer:
    """A model with its optimizer and precision: all that one step needs besides a batch."""

    def __init__(self, model: BertMLM | LSTMLM, settings: Settings, device: torch.device) -> None:
        self.model = model
        self._team: Team | None = None
        self._wrapped: Any = model
        self.settings = settings
        self.device = device
        matrices = [p for p in model.parameters() if p.ndim > 1]
        vectors = [p for p in model.parameters() if p.ndim <= 1]  # biases and norms: no decay
        self.optimizer = torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": WEIGHT_DECAY},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=settings.learning_rate,
            betas=BETAS,
            fused=True,
        )

    def join(self, team: Team | None) -> None:
        """Average every step over a team from now on, or over nobody again."""
        self._team = team
        self._wrapped = self.model if team is None else team.wrap(self.model, self.device)

    def step(self, batch: Batch, learning_rate: float) -> Tensor:
        """Do one step on a batch that is on the device; return its loss, without waiting for it.

        With a learning rate of 0 all the work is done and the weights stay as they are.
        """
        if self._team is not None:
            self._team.begin()
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad(set_to_none=True)
        with self._autocast():
            loss = self._wrapped(batch.input_ids, labels=batch.labels).loss
        loss.backward()
        if self._team is not None:
            self._team.averaged()
        nn.utils.clip_grad_norm_(self.model.parameters(), LARGEST_GRADIENT_NORM)
        self.optimizer.step()
        if self._team is not None:
            return self._team.finish(loss)
        return torch.as_tensor(loss.detach())

    def evaluate(self, batches: Iterable[Batch], model: BertMLM | LSTMLM | None = None) -> float:
        """Return the mean loss over batches on the device, in nats, of `model` or the trainer's."""
        model = self.model if model is None else model
        was_training = model.training
        model.eval()
        with torch.inference_mode(), self._autocast():
            losses = [model(batch.input_ids, labels=batch.labels).loss for batch in batches]
            mean = torch.stack(losses).double().mean()
        model.train(was_training)
        return float(mean)

    def _autocast(self) -> torch.autocast:
        enabled = self.settings.precision == "bf16"
        return torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=enabled)


def learning_rate(settings: Settings, step: int) -> float:
    """Rise linearly over the first tenth of the steps, then fall linearly towards 0."""
    warm_up = max(1, round(WARM_UP_SHARE * settings.steps))
    rising = (step + 1) / warm_up
    falling = (settings.steps - step) / max(1, settings.steps - warm_up)
    return settings.learning_rate * min(rising, falling)


def train(
    trainer: Trainer,
    batches: Batches | Share,
    course: Course,
    stop: Stop,
    progress: Progress | None,
    save: Callable[[], None],
    save_every: float,
) -> None:
    """Train from where `course` is to the last step, or until a stop is requested.

    Args:
        trainer: does the steps.
        batches: one for each step; at `course.place`.
        course: the losses and the place after every step.
        stop: looked at after every step.
        progress: shown after every step; None: by another process.
        save: called every `save_every` seconds.
        save_every: seconds.

    Raises:
        DivergenceError: the loss of a step is not finite; that loss is the last in `losses`.
    """
    settings, losses = trainer.settings, course.losses
    last_save = time.perf_counter()
    if progress is not None:
        progress.begin("training", "step", settings.steps, len(losses), settings.tokens_per_step)
    stream = iter(batches)
    if len(losses) < settings.steps:
        batch = to_device(next(stream), trainer.device)
    while len(losses) < settings.steps and not stop.requested:
        step = len(losses)
        loss = trainer.step(batch, learning_rate(settings, step))
        place = batches.state_dict()
        if step + 1 < settings.steps:  # the next batch is made while a GPU works on this one
            batch = to_device(next(stream), trainer.device)
        losses.append(float(loss))
        course.place = place
        if progress is not None:
            progress.advance(f"loss {losses[-1]:.3f}")
        if not math.isfinite(losses[-1]):
            raise DivergenceError(
                f"the loss of step {step + 1} is {losses[-1]}: use a lower --learning-rate than "
                f"{settings.learning_rate:g}"
            )
        if time.perf_counter() - last_save >= save_every:
            save()
            last_save = time.perf_counter()
