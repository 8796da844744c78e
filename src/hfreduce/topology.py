"""What this process can know about its machine: its node, its processors, where its GPUs are."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

SYSFS = Path("/sys")


def node() -> str:
    """Return what processes have in common that can share memory and see each other live.

    That is the boot of one kernel and one space of process numbers: two containers with spaces of
    their own count as two nodes. HFREDUCE_NODE names another division, for trying several nodes on
    one machine.
    """
    if named := os.environ.get("HFREDUCE_NODE"):
        return f"named-{named}"
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        space = os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return f"unknown-{os.uname().nodename}"
    return f"{boot}-{space}"


def processors() -> int:
    """Return the number of processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def address(device: torch.device) -> str:
    """Return a GPU's address on the PCI bus as sysfs writes it; "" where torch does not say."""
    properties = torch.cuda.get_device_properties(device)
    parts = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
    if None in parts:
        return ""
    domain, bus, slot = parts
    return f"{domain:04x}:{bus:02x}:{slot:02x}.0"


def near(address: str, sysfs: Path = SYSFS) -> set[int]:
    """Return the processors near a PCI device, of those that this thread may run on.

    Args:
        address: Of the device, as sysfs writes it.
        sysfs: Where sysfs is mounted.

    Returns:
        All that it may run on where the machine does not say, or where none of them is near.
    """
    allowed = os.sched_getaffinity(0)
    try:
        text = (sysfs / "bus/pci/devices" / address / "local_cpulist").read_text()
    except OSError:
        return allowed
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found & allowed or allowed


@contextmanager
def running_on(processors: set[int]) -> Iterator[None]:
    """Run this thread there meanwhile: threads that it starts stay there."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, processors)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
