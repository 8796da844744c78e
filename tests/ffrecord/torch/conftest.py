"""A set of two real files, whose record i says i."""

from __future__ import annotations

from pathlib import Path

import pytest

from ffrecord import FileWriter
from tests.ffrecord.torch.sets import N


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("parts")
    for number, (first, last) in enumerate([(0, 40), (40, N)]):
        with FileWriter(folder / f"PART_{number:05d}.ffr") as writer:
            writer.write(str(index).encode() for index in range(first, last))
    return folder


@pytest.fixture(scope="session")
def damaged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of five records, of which number 3 is damaged."""
    path = tmp_path_factory.mktemp("damaged") / "damaged.ffr"
    with FileWriter(path) as writer:
        writer.write([b"00", b"11", b"22", b"33", b"44"])
    content = path.read_bytes()
    path.write_bytes(content.replace(b"33", b"3X"))
    return path
