"""What a figure was measured on: the machine and the versions, as plain data."""

from __future__ import annotations

import os
import platform
import resource
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import hfai


def describe_machine(device: torch.device) -> dict[str, Any]:
    """Return the processor, its cores that this process may use, memory in bytes, and the GPU."""
    machine: dict[str, Any] = {
        "cpu": _cpu_name(),
        "cores": _usable_cores(),
        "torch_threads": torch.get_num_threads(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "gpu": None,
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine["gpu"] = properties.name
        machine["gpu_memory_bytes"] = properties.total_memory
    return machine


def describe_versions() -> dict[str, Any]:
    """Return the versions of all that has a say in a figure; None for what torch lacks."""
    return {
        "hfai": hfai.__version__,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),  # type: ignore[no-untyped-call]
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def peak_memory(device: torch.device) -> int:
    """Return the most memory in use so far, in bytes.

    On a GPU that is what torch had allocated there; on the CPU the resident size of this process.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): bytes there, KiB on Linux
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
