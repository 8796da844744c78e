"""What tests of checkpoints share."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def open_place() -> Iterator[Path]:
    """A directory that another user may enter.

    It is not below pytest's own, which every pytest that starts takes away from others.
    """
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        yield Path(place)
