"""torch against hfai: the same step on the same weights and batches, in turn, in one process.

The trained model is switched between torch's layers and hfai's with `to_torch` and `to_hfai` and
does blocks of whole training steps at a learning rate of 0, which leaves the weights alone. The two
sides alternate in pairs of blocks, each pair in the other order, so that a drift of the machine's
speed meets both alike; what counts is the median over the blocks and over the ratios of the pairs.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from hfai.demo.batches import Batch
from hfai.demo.interrupt import StopRequest
from hfai.demo.progress import Progress
from hfai.demo.train import Trainer
from hfai.kernels.extension import finish_compiling
from hfai.models import LSTMLM, BertMLM
from hfai.nn import to_hfai, to_torch

PAIRS = 15
WARM_UP_STEPS = 3


@dataclass
class Side:
    """What was measured of one side.

    Attributes:
        tokens_per_second: one figure a block.
        loss: on the held-out batches, in nats; None until measured.
        peak_memory: the most that torch had allocated on the GPU in any block, in bytes; None on
            the CPU.
    """

    tokens_per_second: list[float] = field(default_factory=list)
    loss: float | None = None
    peak_memory: int | None = None


@dataclass
class Comparison:
    """Both sides of a comparison that had time for at least one pair of blocks."""

    steps_per_block: int
    torch: Side
    hfai: Side

    @property
    def ratios(self) -> list[float]:
        """The speed of hfai over torch's, for each pair of blocks."""
        pairs = zip(self.hfai.tokens_per_second, self.torch.tokens_per_second, strict=True)
        return [hfai / torch for hfai, torch in pairs]

    @property
    def ratio(self) -> float:
        """The median of `ratios`."""
        return statistics.median(self.ratios)


SWITCH: dict[str, Callable[[BertMLM | LSTMLM], object]] = {"torch": to_torch, "hfai": to_hfai}


def compare(
    trainer: Trainer,
    batches: Sequence[Batch],
    held_out: Sequence[Batch],
    seconds: float,
    stop: StopRequest,
    progress: Progress,
) -> Comparison | None:
    """Measure both sides for about `seconds` in all; the model ends as hfai's.

    Args:
        trainer: holds the model; its optimizer's moments are of no use afterwards.
        batches: on the device; a block goes through them in turn.
        held_out: on the device; for the losses.
        seconds: how long the blocks take together, if one step is short enough for that.
        stop: looked at after every block.
        progress: shown after every block.

    Returns:
        The comparison, or None where a stop was requested before the first pair was done.
    """
    steps = steps_per_block(seconds, max(_warm_up(trainer, name, batches) for name in SWITCH))
    result = Comparison(steps, Side(), Side())
    sides = {"torch": result.torch, "hfai": result.hfai}
    tokens = steps * trainer.settings.tokens_per_step
    progress.begin("torch and hfai in turn", "block", 2 * PAIRS, 0, tokens)
    for pair in range(PAIRS):
        names = list(SWITCH) if pair % 2 == 0 else list(reversed(SWITCH))
        speeds = {}
        for name in names:
            if stop.requested:
                return result if pair else None
            speeds[name] = tokens / _run_block(trainer, name, batches, steps)
            _note_peak_memory(sides[name], trainer.device)
            progress.advance()
        for name, speed in speeds.items():
            sides[name].tokens_per_second.append(speed)
    for name, switch in SWITCH.items():
        switch(trainer.model)
        sides[name].loss = trainer.evaluate(held_out)
    return result


def steps_per_block(seconds: float, step_seconds: float) -> int:
    """Share `seconds` out evenly among all blocks, in whole steps and at least one."""
    return max(1, round(seconds / (2 * PAIRS) / step_seconds))


def _warm_up(trainer: Trainer, name: str, batches: Sequence[Batch]) -> float:
    """Let kernels be built and memory be allocated; return the seconds of a step after that."""
    _run_block(trainer, name, batches, WARM_UP_STEPS)
    finish_compiling()
    return _run_block(trainer, name, batches, 2) / 2


def _run_block(trainer: Trainer, name: str, batches: Sequence[Batch], steps: int) -> float:
    """Do a block of steps on one side; return its seconds, up to the end of the GPU's work."""
    SWITCH[name](trainer.model)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
        torch.cuda.reset_peak_memory_stats(trainer.device)
    start = time.perf_counter()
    for step in range(steps):
        trainer.step(batches[step % len(batches)], learning_rate=0.0)
    if trainer.device.type == "cuda":
        torch.cuda.synchronize(trainer.device)
    return time.perf_counter() - start


def _note_peak_memory(side: Side, device: torch.device) -> None:
    if device.type == "cuda":
        side.peak_memory = max(side.peak_memory or 0, torch.cuda.max_memory_allocated(device))
