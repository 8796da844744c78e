"""The products' programs compile for Hopper, without spills and within its limits."""

from __future__ import annotations

import re

import pytest

from hfai.kernels import jit
from hfai.kernels.products import plan, programs
from tests.kernels.compiled import DEVICES, resources


@pytest.mark.parametrize(
    ("program", "threads"),
    [
        (programs.SPLIT, plan.SPLIT_THREADS),
        (programs.PRODUCT, plan.THREADS),
        (programs.SUM, plan.SUM_THREADS),
        ((["rnn/column_sums.cu"], {"SUM_THREADS": 256}), 256),
    ],
    ids=["split", "product", "sum", "column_sums"],
)
def test_programs_spill_nothing(program: tuple[list[str], dict[str, int]], threads: int) -> None:
    (used,) = resources(programs.text_of(program), programs.ARCHITECTURE).values()
    assert used.spilled == 0
    assert used.stack == 0
    # Registers are given to warps, in eights.
    assert used.registers * threads <= 65536


def test_the_plan_knows_the_sizes_of_the_sources() -> None:
    text = (jit.KERNELS / "products" / "pieces.cuh").read_text()
    rows, depth = re.search(r"ROWS = (\d+), DEPTH = (\d+)", text).groups()  # type: ignore[union-attr]
    assert (int(rows), int(depth)) == (plan.ROWS, plan.DEPTH)
    assert plan.PIECE_PITCH == 3 * plan.ROWS * plan.DEPTH * 2 + 128
    columns = re.search(r"COLUMNS = (\d+)", (jit.KERNELS / "products" / "product.cu").read_text())
    assert columns is not None
    assert int(columns[1]) == plan.COLUMNS
    assert plan.STAGE_PITCH % 1024 == 0
    assert plan.STAGE_PITCH >= plan.PIECE_PITCH - 112


def test_only_hopper_runs_them() -> None:
    assert [name for name, limits in DEVICES.items() if programs.runs_on(limits)] == ["sm_90"]
