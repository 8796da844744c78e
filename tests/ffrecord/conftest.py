"""The samples that the original wrote, and small sets of records."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def manifest() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DATA / "manifest.json").read_text())
    return loaded


@pytest.fixture(scope="session")
def records() -> list[bytes]:
    """Three hundred records of 0 to 3000 bytes."""
    source = random.Random(7)
    return [source.randbytes(source.choice([0, 1, 63, 64, 65, 511, 3000])) for _ in range(300)]
