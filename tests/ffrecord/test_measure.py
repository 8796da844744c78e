"""What `bench` measures by: dropping pages is dropping pages, and ways take turns."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from ffrecord import FileReader, FileWriter
from ffrecord.measure import PLAIN, cached_share, drop, measure


@pytest.fixture
def path(tmp_path: Path) -> Path:
    with FileWriter(tmp_path / "a.ffr") as writer:
        writer.write(random.Random(1).randbytes(20_000) for _ in range(500))
    drop([str(tmp_path / "a.ffr")])
    if cached_share([str(tmp_path / "a.ffr")], random.Random(0)) == 1:
        pytest.skip("the temporary directory is in memory: its pages cannot be dropped")
    return tmp_path / "a.ffr"


def test_what_was_dropped_is_not_in_the_page_cache(path: Path) -> None:
    source = random.Random(0)
    path.read_bytes()
    assert cached_share([str(path)], source) == 1
    drop([str(path)])
    assert cached_share([str(path)], source) < 0.05
    with open(path, "rb") as file:
        file.read(1_000_000)
    # A tenth, and what the kernel has read ahead.
    assert 0.05 < cached_share([str(path)], source) < 0.9


def test_every_way_has_a_figure_of_every_round(path: Path) -> None:
    turns: list[int] = []
    rows = measure(
        [str(path)], names=["python", "python"], rounds=3, seconds=0.01, progress=turns.append
    )
    assert {(row.way, row.cache) for row in rows} == {
        (way, cache) for way in ("python", PLAIN) for cache in ("cold", "hot")
    }
    for row in rows:
        assert len(row.records) == len(row.cpu) == len(row.ratios) == len(row.bytes) == 3
        assert all(rate > 0 for rate in row.records)
    assert sum(turns) == 12
    cold = next(row for row in rows if row.way == PLAIN and row.cache == "cold")
    assert max(cold.cached) < 0.05
    assert FileReader(path).n == 500


def test_a_set_of_many_files_needs_few_descriptors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ffrecord.measure._MOST_OPEN", 4)
    for number in range(40):
        with FileWriter(tmp_path / f"{number:02d}.ffr") as writer:
            writer.write_one(b"x" * 100)
    before = len(os.listdir("/proc/self/fd"))
    rows = measure(str(tmp_path), names=["python"], rounds=1, seconds=0.01)
    assert {len(row.records) for row in rows} == {1}
    assert len(os.listdir("/proc/self/fd")) <= before


def test_an_empty_set_is_refused(tmp_path: Path) -> None:
    FileWriter(tmp_path / "e.ffr", 0).close()
    with pytest.raises(ValueError, match="no records to read"):
        measure([str(tmp_path / "e.ffr")], names=["python"])
