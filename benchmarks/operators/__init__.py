"""The operators that `ops.py` measures: one line each."""

from __future__ import annotations

from benchmarks.harness.case import Operator
from benchmarks.operators.layer_norm import LayerNorm
from benchmarks.operators.rms_norm import RMSNorm

OPERATORS: dict[str, type[Operator]] = {
    LayerNorm.name: LayerNorm,
    RMSNorm.name: RMSNorm,
}
