"""Python, the packages that hfai always needs, and the C++ compiler."""

from __future__ import annotations

import importlib
import os
import platform
import shlex
import subprocess
import sys

from hfai import __version__
from hfai.doctor.check import Check, one_line, with_version
from hfai.kernels.compiler import find_compiler

OLDEST_PYTHON = (3, 10)
NEWEST_TESTED_PYTHON = (3, 13)
ALWAYS_NEEDED = ("numpy", "click", "rich")


def python() -> Check:
    """Check the interpreter's version."""
    version = sys.version_info[:2]
    detail = f"{platform.python_version()}, hfai {__version__}"
    if version < OLDEST_PYTHON:
        remedy = "install hfai under Python 3.10 to 3.13"
        return Check("python", "broken", detail, remedy, required=True)
    if version > NEWEST_TESTED_PYTHON:
        detail += " (tested with Python 3.10 to 3.13)"
    return Check("python", "ok", detail, required=True)


def packages() -> Check:
    """Check that the packages hfai depends on can be imported (torch has a check of its own)."""
    found, faults = [], []
    for package in ALWAYS_NEEDED:
        try:
            importlib.import_module(package)
            found.append(with_version(package))
        except Exception as error:  # a broken extension module can raise anything
            faults.append((package, one_line(error)))
    if faults:
        names = " ".join(package for package, _ in faults)
        detail = "; ".join(f"{package}: {fault}" for package, fault in faults)
        remedy = f"pip install --force-reinstall {names}"
        return Check("packages", "broken", detail, remedy, required=True)
    return Check("packages", "ok", ", ".join(found), required=True)


def compiler() -> Check:
    """Look for a C++ compiler: hfai's build, its autograd nodes and torch.compile use it."""
    command = find_compiler()
    if command is not None:
        shown = shlex.join(command)
        version = _first_line([*command, "--version"])
        if version:
            return Check("C++ compiler", "ok", f"{shown}, {version}")
        remedy = f"see what {shown} --version prints, or name another compiler in CXX"
        return Check("C++ compiler", "broken", f"{shown} does not run", remedy)
    chosen = os.environ.get("CXX")
    if chosen:
        return Check(
            "C++ compiler", "broken", f"CXX names {chosen}, which is not found", "correct CXX"
        )
    detail = "none found: hfai's calls on a GPU then cost some microseconds more"
    return Check("C++ compiler", "missing", detail, "install g++ or clang++")


def _first_line(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().split("\n", 1)[0]
