"""Where threads that serve a GPU run, by a machine that is described in files."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from hfreduce import topology

ADDRESS = "0000:1b:00.0"


@pytest.fixture
def sysfs(tmp_path: Path) -> Path:
    """Return a directory that has a device which is near the last of this thread's processors."""
    device = tmp_path / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    last = max(os.sched_getaffinity(0))
    (device / "local_cpulist").write_text(f"{last}-{last},5000-5003\n")
    return tmp_path


def test_processors_near_a_gpu_are_those_of_its_node_that_may_be_used(sysfs: Path) -> None:
    assert topology.near(ADDRESS, sysfs) == {max(os.sched_getaffinity(0))}


@pytest.mark.parametrize("listed", [None, "\n", "5000-5003,5010\n"])
def test_where_none_is_near_or_nothing_is_said_all_count(sysfs: Path, listed: str | None) -> None:
    path = sysfs / "bus/pci/devices" / ADDRESS / "local_cpulist"
    path.unlink() if listed is None else path.write_text(listed)
    assert topology.near(ADDRESS, sysfs) == os.sched_getaffinity(0)


def test_threads_that_are_started_there_stay_there_and_this_one_comes_back() -> None:
    before, found = os.sched_getaffinity(0), []
    begin = threading.Event()

    def run() -> None:
        begin.wait(20)
        found.append(os.sched_getaffinity(0))

    with topology.running_on({max(before)}):
        thread = threading.Thread(target=run)
        thread.start()
    begin.set()
    thread.join(20)
    assert found == [{max(before)}]
    assert os.sched_getaffinity(0) == before
