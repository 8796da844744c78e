"""The loss curve as a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from hfai.atomic import replacing


def draw_losses(path: Path, losses: Sequence[float], unigram: float, title: str) -> None:
    """Write a PNG of the training loss over the steps, and of its running mean.

    Args:
        path: the file, written whole or not at all.
        losses: one a step, in nats.
        unigram: the loss of guessing by byte frequency, drawn as a line to measure against.
        title: above the picture.
    """
    steps = np.arange(1, len(losses) + 1)
    # No pyplot: it keeps figures and a backend for the whole process.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    axes.plot(steps, losses, color="tab:blue", alpha=0.3, linewidth=0.8, label="each step")
    axes.plot(steps, running_mean(losses), color="tab:blue", linewidth=1.8, label="running mean")
    guessing = f"guessing by byte frequency: {unigram:.2f}"
    axes.axhline(unigram, color="tab:gray", linestyle="--", linewidth=1, label=guessing)
    axes.set(xlabel="step", ylabel="training loss (nats a byte)", title=title)
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=120)


def running_mean(losses: Sequence[float]) -> list[float]:
    """Return the mean of each value and its neighbours, over a fiftieth of the whole."""
    reach = len(losses) // 100
    sums = np.concatenate([[0.0], np.cumsum(losses)])
    places = np.arange(len(losses))
    starts = np.maximum(0, places - reach)
    ends = np.minimum(len(losses), places + reach + 1)
    return [float(mean) for mean in (sums[ends] - sums[starts]) / (ends - starts)]
