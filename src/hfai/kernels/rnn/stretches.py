"""Into how many stretches a wavefront cuts its steps, and in which order it runs them."""

from __future__ import annotations

from hfai.kernels import jit
from hfai.kernels.rnn.autograd import Sequences
from hfai.kernels.rnn.launch import Steps
from hfai.kernels.rnn.programs import Configuration

# Microseconds on the host of a layer's stretch, both passes, and on the device of a layer's step,
# measured with an H200 whose host was slow: stacks in three and four stretches were bound by it.
STRETCH_ON_HOST = 700.0
STEP_ON_DEVICE = 2.3
MOST_STRETCHES = 8
# Of the time of one layer after the other; above, the estimate is too close to tell.
WORTHWHILE = 0.8
# Left to the products, whose blocks do not fit beside a recurrence's on a multiprocessor.
LEFT_TO_PRODUCTS = 4


def stretch_count(configuration: Configuration, layers: int, sequences: Sequences) -> int:
    """Return into how many stretches the steps are best cut; 1 where a wavefront gains nothing."""
    plan, steps = configuration.plan, sequences.steps
    if layers == 1 or plan.directions > 1 or sequences.batch_sizes is not None:
        return 1
    room = jit.device_limits(configuration.device).multiprocessors - LEFT_TO_PRODUCTS
    at_once = room // (plan.blocks * plan.groups(steps.batch))
    if at_once < 2:
        return 1
    most = min(MOST_STRETCHES, steps.steps)
    times = {count: _time(layers, count, steps.steps, at_once) for count in range(1, most + 1)}
    best = min(times, key=lambda count: times[count])
    return best if times[best] < WORTHWHILE * times[1] else 1


def _time(layers: int, stretches: int, steps: int, at_once: int) -> float:
    """Return microseconds of both passes; `at_once` layers have room on the device together."""
    in_turn = max(layers + stretches - 1, layers * stretches / at_once) if stretches > 1 else layers
    on_device = in_turn * STEP_ON_DEVICE * steps / stretches
    return max(on_device, layers * stretches * STRETCH_ON_HOST if stretches > 1 else 0.0)


def cut(steps: Steps, stretches: int) -> list[tuple[int, Steps]]:
    """Return the first step and the shape of each stretch, none empty."""
    found = []
    for turn in range(stretches):
        first = turn * steps.steps // stretches
        count = (turn + 1) * steps.steps // stretches - first
        found.append((first, Steps(count, steps.batch, count * steps.batch)))
    return found


def rows_of(part: tuple[int, Steps], batch: int) -> slice:
    """Return the rows of a stretch that `cut` made."""
    first, steps = part
    return slice(first * batch, (first + steps.steps) * batch)


def diagonals(layers: int, stretches: int) -> list[tuple[int, int]]:
    """Return layers and stretches in an order in which each follows those it needs."""
    return [
        (layer, diagonal - layer)
        for diagonal in range(layers + stretches - 1)
        for layer in range(layers)
        if 0 <= diagonal - layer < stretches
    ]
