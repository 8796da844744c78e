"""The sources compile for every architecture, without a GPU, and spill nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hfai.kernels import jit
from hfai.kernels.residual_norm import plan, programs
from hfai.kernels.residual_norm.programs import Types
from tests.kernels.compiled import DEVICES, Resources, resources

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, which are for Linux")

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
REGISTERS = 65_536  # of a multiprocessor
AUTOCAST = Types(BF16, FP32, FP32, FP32)
TYPES = {"autocast": AUTOCAST, "fp32": Types(*[FP32] * 4), "fp16": Types(*[FP16] * 4)}


class Compiled(programs.Configuration):
    """A configuration that compiles for a device that is not there, and keeps what it takes."""

    architecture = "sm_90"

    def _load(  # type: ignore[override]
        self,
        sources: list[str],
        constants: dict[str, int | bool],
        name: str,
        block: int,
        shared_bytes: int,
        overlap: bool,
    ) -> tuple[Resources, int, int]:
        text = jit.program_text(sources, constants, self.types.names())
        found = resources(text, self.architecture)[f"hfai_residual_norm_{name}"]
        return found, block, shared_bytes


def compiled(architecture: str, length: int, types: Types, **options: bool) -> list[Any]:
    flags = {"has_weight": True, "has_bias": True, "has_branch_bias": True, "dropout": True}
    configuration = Compiled(0, length, types, **(flags | options))
    configuration.architecture = architecture
    return [
        loaded.kernel
        for loaded in (
            configuration.forward(),
            configuration.backward(True, True),
            configuration.backward(False, False),
            configuration.add_partials(),
        )
    ]


@pytest.mark.parametrize(
    ("architecture", "length", "name"),
    [
        ("sm_80", 1024, "autocast"),
        ("sm_89", 768, "fp16"),
        ("sm_90", 1024, "autocast"),
        ("sm_90", 4096, "autocast"),
        ("sm_90", 768, "fp16"),
        ("sm_100", 1024, "autocast"),
    ],
)
def test_nothing_spills_and_blocks_fit(architecture: str, length: int, name: str) -> None:
    limits = DEVICES[architecture]
    for found, block, shared_bytes in compiled(architecture, length, TYPES[name]):
        assert found.spilled == found.stack == found.shared == 0
        assert found.registers * block <= REGISTERS
        assert shared_bytes <= min(48 * 1024, limits.shared_bytes_per_block)


@pytest.mark.parametrize("length", [768, 1024])
def test_a_multiprocessor_has_registers_for_as_many_threads_as_planned(length: int) -> None:
    _, (found, block, shared_bytes), *_ = compiled("sm_90", length, AUTOCAST)
    blocks = plan.backward_plan(length, AUTOCAST.widest).blocks
    assert blocks * block == plan.THREADS_AT_WORK
    assert found.registers * block * blocks <= REGISTERS
    assert blocks * (shared_bytes + 1024) <= 228 * 1024


@pytest.mark.parametrize("missing", ["has_weight", "dropout"])
def test_without_one_of_the_parts(missing: str) -> None:
    for found, *_ in compiled("sm_90", 1024, AUTOCAST, **{missing: False}):
        assert found.spilled == 0
