"""Parts that need packages beyond hfai's own: the demo's plots, the benchmarks' peers."""

from __future__ import annotations

import importlib
from importlib import util

from hfai.doctor.check import Check, one_line, with_version

PEERS = {"liger_kernel": "liger-kernel", "quack": "quack-kernels"}


def demo_plots() -> Check:
    """Check that matplotlib, which draws the demo's curve, can be imported."""
    name, remedy = "demo's plots", "pip install 'hfai[demo]'"
    if util.find_spec("matplotlib") is None:
        detail = "matplotlib is not installed: the demo writes figures as JSON only"
        return Check(name, "missing", detail, remedy)
    try:
        importlib.import_module("matplotlib")
    except Exception as error:
        return Check(name, "broken", one_line(error), remedy)
    return Check(name, "ok", with_version("matplotlib"))


def benchmark_peers() -> Check:
    """Look for the libraries that benchmarks compare with; they are only looked for, not loaded."""
    name = "benchmarks' peers"
    found = [
        with_version(package)
        for module, package in PEERS.items()
        if util.find_spec(module) is not None
    ]
    if not found:
        detail = "none installed: benchmarks compare with torch alone"
        return Check(name, "missing", detail, "pip install 'hfai[bench]'")
    return Check(name, "ok", ", ".join(found))
