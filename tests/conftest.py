"""What all tests share: the devices there are, and a fixed seed."""

from __future__ import annotations

import pytest
import torch

# A test that takes `device` runs on the GPU as well wherever there is one. Tests of what only a
# GPU has lie in tests/gpu, which says that it was skipped and why.
DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Each device of this machine in turn."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Draw the same random numbers however the tests are ordered or spread over processes."""
    torch.manual_seed(20240)
