"""Batches in pinned memory, which needs a GPU's driver."""

from __future__ import annotations

from pathlib import Path

from ffrecord import FileWriter
from ffrecord.torch import DataLoader
from tests.ffrecord.torch.sets import Numbers


def test_batches_are_pinned_on_request(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "numbers.ffr") as writer:
        writer.write(str(index).encode() for index in range(20))
    dataset = Numbers(tmp_path / "numbers.ffr")
    for workers in (0, 1):
        batches = list(DataLoader(dataset, 10, num_workers=workers, pin_memory=True))
        assert [batch.is_pinned() for batch in batches] == [True, True]
