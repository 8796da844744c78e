"""Which processors lie near which GPU.

A process that runs on the processors of its GPU's NUMA node allocates its memory there too, so
copies do not cross between sockets. All is read from sysfs: no GPU is touched.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

SYSFS = Path("/sys")
DRIVER = Path("/proc/driver/nvidia/gpus")


def nodes(allowed: set[int], sysfs: Path = SYSFS) -> dict[int, set[int]]:
    """Return the processors of each NUMA node, of those that may be used."""
    found = {}
    for directory in sorted((sysfs / "devices/system/node").glob("node[0-9]*")):
        listed = parse_list((directory / "cpulist").read_text())
        if listed & allowed:
            found[int(directory.name.removeprefix("node"))] = listed & allowed
    return found


def gpu_nodes(visible: str | None = None, sysfs: Path = SYSFS, driver: Path = DRIVER) -> list[int]:
    """Return the NUMA node of each GPU, in the order in which programs see them.

    Args:
        visible: CUDA_VISIBLE_DEVICES.
        sysfs: Where sysfs is mounted.
        driver: Where NVIDIA's driver lists its GPUs.

    Returns:
        A node for each GPU, -1 where the machine does not say; nothing where GPUs are chosen by
        other means than their numbers. The order is the bus's, which is CUDA's for equal GPUs.
    """
    addresses = sorted(path.name for path in driver.glob("*")) if driver.exists() else []
    found = []
    for address in addresses:
        try:
            text = (sysfs / "bus/pci/devices" / address.lower() / "numa_node").read_text()
        except OSError:
            text = "-1"
        found.append(int(text))
    if visible is None:
        return found
    chosen = []
    for text in filter(None, (part.strip() for part in visible.split(","))):
        if not text.isdigit() or int(text) >= len(found):
            return []
        chosen.append(found[int(text)])
    return chosen


def plan(nprocs: int, near: dict[int, set[int]], gpus: Sequence[int]) -> list[set[int]] | None:
    """Return the processors of each process, or None where there is nothing to choose.

    Args:
        nprocs: The number of processes.
        near: The processors of each node.
        gpus: The node of each GPU; process r has GPU r.

    Processes without a known GPU are spread over the nodes in blocks.
    """
    if len(near) < 2:
        return None
    order = sorted(near)
    chosen = []
    for rank in range(nprocs):
        node = gpus[rank] if rank < len(gpus) else -1
        if node not in near:
            node = order[rank * len(order) // nprocs]
        chosen.append(near[node])
    return chosen


def here(nprocs: int) -> list[set[int]] | None:
    """Return the plan for this machine."""
    allowed = os.sched_getaffinity(0)
    return plan(nprocs, nodes(allowed), gpu_nodes(os.environ.get("CUDA_VISIBLE_DEVICES")))


def parse_list(text: str) -> set[int]:
    """Return the numbers of a list in the kernel's form: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
