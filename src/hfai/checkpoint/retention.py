"""Names of checkpoints by step, and which of them stay."""

from __future__ import annotations

import re
from collections.abc import Iterable

_NAME = re.compile(r"step-(\d{8,})\Z")


def step_name(step: int) -> str:
    """Return the name of a step's checkpoint."""
    return f"step-{step:08d}"


def step_of(name: str) -> int | None:
    """Return the step of a checkpoint's name; None where it is no such name."""
    found = _NAME.match(name)
    return int(found[1]) if found else None


def steps_of(names: Iterable[str]) -> list[int]:
    """Return the steps of checkpoints' names, in order; other names are left out."""
    return sorted(step for step in map(step_of, names) if step is not None)


def to_remove(
    names: Iterable[str], keep: int, keep_every: int | None, newest: int | None = None
) -> list[str]:
    """Return the names of checkpoints that do not stay, the oldest first.

    Args:
        names: Of checkpoints; those that are no step's stay.
        keep: How many of the newest stay.
        keep_every: Steps that this divides stay too; None: no others.
        newest: The step that counts as the newest; later ones stay. They are of a training that was
            taken up again at an earlier step, perhaps because they are damaged: counting them, the
            checkpoint that was saved just now would be the one to go.
    """
    steps = [step for step in steps_of(names) if newest is None or step <= newest]
    return [step_name(step) for step in steps[:-keep] if keep_every is None or step % keep_every]
