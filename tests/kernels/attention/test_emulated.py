"""The kernels' own sources, run thread by thread on the CPU, compute what float64 does."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.attention import launch, programs
from hfai.kernels.attention.masking import Masking
from tests.kernels.attention import emulated
from tests.kernels.attention.cases import BF16, FP16, FP32, TOLERANCES, Call, call, error, padding
from tests.kernels.compiled import DEVICES

pytestmark = pytest.mark.skipif(emulated.COMPILER is None, reason="needs g++ for the emulation")


@pytest.fixture(autouse=True)
def _emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the emulator where programs are compiled and loaded, with a Hopper's limits."""

    def load(
        sources: list[str], name: str, plan: Any, dtype: torch.dtype, device: int, constants: Any
    ) -> emulated.EmulatedKernel:
        constants = plan.constants() | constants
        return emulated.load(sources, constants, dtype, name, plan.threads, plan.shared_bytes)

    monkeypatch.setattr(programs, "_load", load)
    for kept in ("_forward", "_backward", "_weights"):
        monkeypatch.setattr(programs, kept, {})
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_90"])
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)


def check(case: Call, *, weights: bool = True) -> None:
    q, k, v, masking = case.q, case.k, case.v, case.masking
    out, expected_weights, gradients = case.expected()
    tolerance = TOLERANCES[q.dtype]
    made, lse = launch.attention_forward(q, k, v, masking, _poisoned(q))
    assert error(made, out) < tolerance
    targets = (_poisoned(q), _poisoned(k), _poisoned(v))
    found = launch.attention_backward(case.dout, q, k, v, made, lse, masking, targets)
    for gradient, expected in zip(found, gradients, strict=True):
        assert error(gradient, expected) < tolerance
    if weights:
        each = launch.attention_weights(q, k, lse, masking, False)
        assert error(each, expected_weights) < tolerance
        averaged = launch.attention_weights(q, k, lse, masking, True)
        assert error(averaged, expected_weights.mean(1)) < tolerance


def _poisoned(like: torch.Tensor) -> torch.Tensor:
    return launch.like_rows(like).fill_(float("nan"))


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_every_type_from_a_packed_product(dtype: torch.dtype) -> None:
    check(call(dtype, 2, 64, 64, 2, 64, packed=True))
