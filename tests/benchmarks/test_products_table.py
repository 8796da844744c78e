"""The tables of products: speed and error beside torch's, and what the grid's choice got wrong."""

from __future__ import annotations

from typing import Any

from benchmarks.drawing.products import grid, table
from benchmarks.drawing.results import Result


def _case(k: int, ours: float, left_to_torch: str | None = None) -> dict[str, Any]:
    return {
        "what": "a layer's",
        "size": {"m": 1000, "k": k, "n": 2000},
        "flops": 4_000_000 * k,
        "errors": {"torch": 4e-7, "hfai": 1e-7},
        "left_to_torch": left_to_torch,
        "times": {"torch": {"median": 1.0}, "hfai": {"median": ours}},
        "speed": 1.0 / ours,
    }


def _result(*cases: dict[str, Any]) -> Result:
    data = {
        "machine": {"name": "a GPU"},
        "versions": {},
        "complete": True,
        "date": "2026-12-01",
        "command": "python benchmarks/products.py",
        "cases": list(cases),
    }
    return Result("products", data)


def test_a_row_says_rate_speed_and_error() -> None:
    rows = [line for line in table(_result(_case(100, 0.5))).splitlines() if "×" in line]
    assert rows[1:] == ["| a layer's | 1000 × 100 × 2000 | 1.000 | 0.500 | 1 | 2.00 | 0.25 |"]


def test_the_grid_names_what_was_chosen_wrongly() -> None:
    cases = (_case(10, 0.5), _case(20, 1.25), _case(30, 2.0, "small"), _case(40, 0.8, "small"))
    lines = grid(_result(*cases)).splitlines()
    assert lines[0] == (
        "4 sizes. 2 are ours: at 0.80 to 2.00 of torch's speed. "
        "2 are left to torch: at 0.50 to 1.25 of torch's speed."
    )
    assert lines[2] == "Slower than torch: 1000 × 20 × 2000 (0.80)."
    assert lines[4] == "Left, though faster by 10 %: 1000 × 40 × 2000 (1.25)."
