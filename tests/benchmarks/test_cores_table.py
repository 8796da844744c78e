"""The table of attention's cores: every pass a row, ours first, spreads only where wide."""

from __future__ import annotations

from typing import Any

from benchmarks.drawing.cores import table
from benchmarks.drawing.results import Result


def _time(median: float, spread: float = 0.0) -> dict[str, float]:
    return {"median": median, "least": median * (1 - spread), "most": median * (1 + spread)}


def test_each_pass_is_a_row_and_only_a_wide_spread_is_shown() -> None:
    case: dict[str, Any] = {
        "shape": {"batch": 2, "length": 3, "heads": 4, "head_dim": 8},
        "dtype": "bfloat16",
        "forward": {"cudnn": _time(2.0), "hfai": _time(1.0, 0.1)},
        "backward": {"hfai": _time(4.0, 0.01)},
        "weights": {"hfai": _time(0.5)},
    }
    data = {
        "machine": {"name": "a GPU"},
        "versions": {},
        "complete": True,
        "date": "2026-11-30",
        "command": "python benchmarks/attention_cores.py",
        "cases": [case],
    }
    rows = [line for line in table(Result("attention_cores", data)).splitlines() if "×" in line]
    assert rows[1:] == [
        "| 2×3×4×8 | bfloat16 | forward | 1.000 (0.900 to 1.100) |  |  | 2.000 |",
        "| 2×3×4×8 | bfloat16 | backward | 4.000 |  |  |  |",
        "| 2×3×4×8 | bfloat16 | weights | 0.500 |  |  |  |",
    ]
