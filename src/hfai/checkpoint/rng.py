"""The state of all random number generators of a process: Python's, NumPy's, torch's."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def capture() -> dict[str, Any]:
    """Return the states, as values that a checkpoint stores."""
    numpy: Any = np.random.get_state(legacy=False)
    found: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": numpy,
        "torch": torch.get_rng_state(),
    }
    cuda: Any = torch.cuda
    if cuda.is_available() and cuda.is_initialized():
        found["cuda"] = list(torch.cuda.get_rng_state_all())
    return found


def restore(states: dict[str, Any]) -> None:
    """Put the generators into those states.

    GPUs beyond those that were captured, or that are not here, are left alone.
    """
    random.setstate(states["python"])
    np.random.set_state(states["numpy"])
    torch.set_rng_state(states["torch"].cpu())
    if torch.cuda.is_available():
        for device, state in enumerate(states.get("cuda", ())[: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state.cpu(), device)
