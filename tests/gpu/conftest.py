"""Tests here need a GPU and the means to compile kernels; without them each says why it skipped."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from hfai.kernels import jit


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    """Skip without a GPU; give memory back afterwards, since several processes share the GPU."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device, and torch finds none")
    reason = jit.why_unavailable()
    if reason is not None:
        pytest.skip(f"needs hfai's kernels, and {reason}")
    yield
    torch.cuda.empty_cache()
