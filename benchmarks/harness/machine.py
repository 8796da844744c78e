"""What a result file says about the machine, the software and the run that made it."""

from __future__ import annotations

import os
import platform
import re
import shlex
import subprocess
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import hfai

ROOT = Path(__file__).resolve().parents[2]
PLACE_OPTIONS = ("--out", "--commit")
PACKAGES = ("torch", "triton", "liger-kernel", "quack-kernels", "cuda-core", "numpy")


def describe(device: torch.device) -> dict[str, Any]:
    """Return the machine: processor, memory, and the GPU and its driver where that is measured."""
    machine: dict[str, Any] = {
        "name": _processor(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        machine |= {
            "name": properties.name,
            "gpu": properties.name,
            "compute_capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "driver": _driver(),
        }
    machine["slug"] = slug(machine["name"])
    return machine


def slug(name: str) -> str:
    """Return a directory's name for a machine: "NVIDIA H200" gives "nvidia-h200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unknown"


def versions(device: torch.device) -> dict[str, str]:
    """Return the versions of everything that has a part in the numbers."""
    found = {"python": platform.python_version(), "hfai": hfai.__version__}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    if device.type == "cuda" and torch.version.cuda:
        found["cuda"] = torch.version.cuda
    return found


def command(arguments: Sequence[str]) -> str:
    """Return the command of a run, as one types it at the repository's root.

    Options that change no number (`PLACE_OPTIONS`) are left out: their values belong to the machine
    on which the run was made.
    """
    kept = []
    rest = iter(arguments)
    for argument in rest:
        if argument in PLACE_OPTIONS:
            next(rest, None)
        elif not argument.startswith(tuple(f"{option}=" for option in PLACE_OPTIONS)):
            kept.append(argument)
    return shlex.join(["python", "benchmarks/ops.py", *kept])


def commit() -> str | None:
    """Return the checked-out commit, marked where sources differ from it; None outside git."""
    head = _output(["git", "rev-parse", "HEAD"])
    if not head:
        return None
    changed = _output(["git", "status", "--porcelain", "--", "src", "benchmarks/*.py"])
    return f"{head} and uncommitted changes" if changed else head


def now() -> str:
    """Return the date and time, UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    match = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return match[1].strip() if match else platform.processor() or platform.machine()


def _driver() -> str | None:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    text = _output(query)
    return text.split("\n", 1)[0] if text else None


def _output(arguments: list[str]) -> str:
    """Return what a program prints, or nothing where it is absent, fails or hangs."""
    try:
        done = subprocess.run(
            arguments, cwd=ROOT, capture_output=True, text=True, timeout=10, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()
