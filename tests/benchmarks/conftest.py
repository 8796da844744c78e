"""Runs the scripts of benchmarks/ as a user does, and makes up result files to draw from."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness import result
from benchmarks.harness.ceiling import Ceilings
from benchmarks.harness.result import CaseResult, Row
from benchmarks.harness.timing import summarise
from benchmarks.operators import OPERATORS

ROOT = Path(__file__).resolve().parents[2]

# How far above its floor each implementation is in the made-up results below, and the time that
# even an empty kernel takes.
ABOVE_FLOOR = {"torch": 1.8, "liger": 1.4, "hfai": 1.1}
LAUNCH_MS = 0.002


@pytest.fixture(scope="session")
def run_script() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Return a function that runs a script of benchmarks/ as a user does, on one thread."""

    def run(script: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, ROOT / "benchmarks" / script, *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=120,
            env=one_thread(),
        )

    return run


def one_thread() -> dict[str, str]:
    """Return an environment in which torch uses one thread: tests run beside each other."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "160"}


@pytest.fixture
def write_results() -> Callable[..., Path]:
    """Return a function that writes a complete result file with made-up times."""

    def write(
        directory: Path,
        operator_name: str = "layer_norm",
        grid: bool = False,
        machine: str = "NVIDIA Made-Up 1",
        slower_case: str = "",
    ) -> Path:
        operator = OPERATORS[operator_name]()
        ceilings = Ceilings(4e12, {"fp32": 5e13})
        cases = []
        for case in operator.grid() if grid else operator.cases():
            floor: dict[str, Any] = {
                name: {"bytes": w.bytes, "operations": w.operations, "ms": ceilings.floor_ms(w)}
                for name, w in zip(("forward", "backward"), operator.work(case), strict=True)
            }
            made = CaseResult(case, floor, input_sets=1)
            if 2 * operator.input_bytes(case) > 130e9:
                made.skipped = "needs more GPU memory than there is"
            for name, factor in ABOVE_FLOOR.items() if not made.skipped else ():
                factor *= 3 if case.name == slower_case and name == "hfai" else 1
                row = Row(name, path="hfai" if name == "hfai" else "", errors={"y": 1e-7})
                for what, values in floor.items():
                    row.kernel[what] = summarise([LAUNCH_MS + factor * values["ms"]], "graph")
                if not grid:
                    row.peak_memory_bytes = case.elements * 4
                    for what in ("no_grad", "forward", "both"):
                        row.call[what] = summarise(
                            [0.02 + factor * floor["backward"]["ms"]], "wall"
                        )
                made.rows.append(row)
            cases.append(made.as_dict())
        name = f"{operator_name}_grid" if grid else operator_name
        slug = machine.lower().replace(" ", "-")
        path = directory / slug / f"{name}.json"
        document = {
            "operator": operator_name,
            "complete": True,
            "command": f"python benchmarks/ops.py --op {operator_name}{' --grid' if grid else ''}",
            "date": "2026-01-02T03:04:05+00:00",
            "commit": None,
            "seed": 1,
            "machine": {"name": machine, "slug": slug, "driver": "1.2.3"},
            "versions": {"python": "3.12.0", "torch": "2.11.0"},
            "ceilings": {"bytes_per_second": 4e12, "operations_per_second": {"fp32": 5e13}},
            "cases": cases,
        }
        result.write(path, document)
        return path

    return write
