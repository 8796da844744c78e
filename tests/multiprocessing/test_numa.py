"""Processes are put near their GPUs, read from a machine's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfai.multiprocessing import numa


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """Two sockets of four processors; GPUs 0 and 2 on the second, 1 on the first, 3 unknown."""
    for node, listed in ((0, "0-1,4-5"), (1, "2-3,6-7")):
        directory = tmp_path / "sys/devices/system/node" / f"node{node}"
        directory.mkdir(parents=True)
        (directory / "cpulist").write_text(f"{listed}\n")
    for bus, node in (("01", 1), ("02", 0), ("81", 1), ("c1", -1)):
        address = f"0000:{bus}:00.0"
        (tmp_path / "driver" / address.upper()).mkdir(parents=True)
        device = tmp_path / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "numa_node").write_text(f"{node}\n")
    return tmp_path / "sys", tmp_path / "driver"


def test_nodes_and_gpus_are_read(machine: tuple[Path, Path]) -> None:
    sysfs, driver = machine
    assert numa.nodes(set(range(8)), sysfs) == {0: {0, 1, 4, 5}, 1: {2, 3, 6, 7}}
    assert numa.nodes({0, 2}, sysfs) == {0: {0}, 1: {2}}, "what the process may not use is out"
    assert numa.nodes({0, 1}, sysfs) == {0: {0, 1}}
    assert numa.gpu_nodes(None, sysfs, driver) == [1, 0, 1, -1]
    assert numa.gpu_nodes("2, 1", sysfs, driver) == [1, 0]
    assert numa.gpu_nodes("", sysfs, driver) == []
    assert numa.gpu_nodes("GPU-aa", sysfs, driver) == [], "by name: who knows"
    assert numa.gpu_nodes("7", sysfs, driver) == []
    assert numa.gpu_nodes(None, sysfs, driver / "none") == []


def test_each_process_gets_the_processors_near_its_gpu() -> None:
    near = {0: {0, 1}, 1: {2, 3}}
    assert numa.plan(3, near, [1, 0, 1]) == [{2, 3}, {0, 1}, {2, 3}]
    assert numa.plan(4, near, []) == [{0, 1}, {0, 1}, {2, 3}, {2, 3}], "in blocks without GPUs"
    assert numa.plan(2, near, [-1, 0]) == [{0, 1}, {0, 1}]
    assert numa.plan(2, {0: {0, 1}}, [0, 0]) is None, "nothing to choose"


def test_lists_of_the_kernel_are_understood() -> None:
    assert numa.parse_list("0-2,7,9-9\n") == {0, 1, 2, 7, 9}
    assert numa.parse_list("\n") == set()
