"""What this process can know about the machine it runs on: its node, its processors."""

from __future__ import annotations

import os
from pathlib import Path


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
