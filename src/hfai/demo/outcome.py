"""What a run came to: the facts that the table, the picture and the JSON are made from."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import dataclass

from torch import nn

from hfai.demo.check import RoundTrip
from hfai.demo.compare import Comparison
from hfai.demo.settings import Settings
from hfai.nn import to_hfai
from hfai.nn.explain import explain

# How far the held-out loss may differ between torch's layers and hfai's, relative to itself. They
# round differently; these are some ten times what that comes to.
LOSS_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3}
LAST_LOSSES = 20


@dataclass(frozen=True)
class PathCount:
    """How many layers of one class take one path, and why."""

    layer: str
    path: str
    reason: str
    count: int


@dataclass(frozen=True)
class Swap:
    """What `to_hfai` swapped, by class name, and the paths that `hfai.explain` gives."""

    swapped: dict[str, int]
    paths: tuple[PathCount, ...]

    @classmethod
    def of(cls, model: nn.Module) -> Swap:
        """Convert `model` in place and take note of what that did."""
        before = [type(module) for module in model.modules()]
        to_hfai(model)
        after = [type(module) for module in model.modules()]
        swapped = Counter(
            new.__name__ for old, new in zip(before, after, strict=True) if new != old
        )
        groups = Counter((row.layer, row.path, row.reason) for row in explain(model))
        return cls(dict(swapped), tuple(PathCount(*group, n) for group, n in groups.items()))


@dataclass(frozen=True)
class Together:
    """Processes that trained together.

    Attributes:
        nprocs: their number.
        step_seconds: of a step, the median.
        waiting_share: of a step's time, from when the first process had all its gradients until it
            had the average: the median.
    """

    nprocs: int
    step_seconds: float | None
    waiting_share: float | None

    @classmethod
    def of(cls, nprocs: int, waits: list[float], steps: list[float]) -> Together:
        """Sum up what was measured of each step; the first one also starts things."""
        if len(steps) < 2:
            return cls(nprocs, None, None)
        shares = [wait / step for wait, step in zip(waits[1:], steps[1:], strict=True)]
        return cls(nprocs, statistics.median(steps[1:]), statistics.median(shares))


@dataclass(frozen=True)
class Check:
    """Something that must hold, whether it did, and what was seen."""

    name: str
    passed: bool
    detail: str


@dataclass
class Outcome:
    """A run, finished or not.

    Attributes:
        settings: what was trained.
        losses: one a step, in nats.
        training_seconds: of all steps, also of those before a resume.
        resumed_from: the step at which this process took over; 0 for a run of one piece.
        unigram: the loss of guessing by byte frequency, in nats.
        swap: the layers.
        peak_memory: at the end of the training, in bytes: see `machine.peak_memory`.
        interrupted: a signal ended it early.
        failure: why it could not go on, else None.
        comparison: torch against hfai, if it came to that.
        round_trip: the way back to torch, if it came to that.
        together: the processes that trained, where it was not this one alone.
    """

    settings: Settings
    losses: list[float]
    training_seconds: float
    resumed_from: int
    unigram: float
    swap: Swap
    peak_memory: int = 0
    interrupted: bool = False
    failure: str | None = None
    comparison: Comparison | None = None
    round_trip: RoundTrip | None = None
    together: Together | None = None

    @property
    def last_loss(self) -> float | None:
        """The mean over the last steps, at most `LAST_LOSSES` of them; None before the first."""
        last = self.losses[-LAST_LOSSES:]
        return sum(last) / len(last) if last else None

    @property
    def training_tokens_per_second(self) -> float | None:
        """The speed of the training loop as a whole; None before the first step."""
        if not self.losses or not self.training_seconds:
            return None
        return len(self.losses) * self.settings.tokens_per_step / self.training_seconds

    def checks(self) -> list[Check]:
        """Return the checks that the run came to."""
        checks = []
        comparison, trip = self.comparison, self.round_trip
        if self.failure is not None:
            checks.append(Check("the loss stays finite", False, self.failure))
        if comparison is not None and comparison.torch.loss is not None:
            torch_loss, hfai_loss = comparison.torch.loss, comparison.hfai.loss
            assert hfai_loss is not None  # measured together
            tolerance = LOSS_TOLERANCE[self.settings.precision] * abs(torch_loss)
            checks.append(
                Check(
                    "hfai's layers give torch's loss",
                    abs(hfai_loss - torch_loss) <= tolerance,
                    f"{hfai_loss:.6f} and {torch_loss:.6f}, allowed apart: {tolerance:.1e}",
                )
            )
        if trip is not None:
            checks.append(
                Check(
                    "the saved model gives the same loss in plain torch",
                    trip.passed,
                    f"{trip.loaded_loss:.6f} and {trip.converted_loss:.6f}, equal to the last bit",
                )
            )
        return checks

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return all(check.passed for check in self.checks())
