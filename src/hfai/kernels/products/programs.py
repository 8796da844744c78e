"""The compiled kernels of products, made on first use for a device, and kept."""

from __future__ import annotations

import functools
from typing import NamedTuple

from hfai.kernels import jit
from hfai.kernels.products import plan

ARCHITECTURE = "sm_90a"
"""What NVRTC compiles for: the products of warpgroups are in no later architecture."""

SPLIT = (["products/pieces.cuh", "products/split.cu"], {"SPLIT_THREADS": plan.SPLIT_THREADS})
PRODUCT = (
    ["warpgroup.cuh", "products/pieces.cuh", "products/machine.cuh", "products/product.cu"],
    {"STAGES": plan.STAGES},
)
SUM = (["products/sum.cu"], {"SUM_THREADS": plan.SUM_THREADS})


class Programs(NamedTuple):
    """Of one device."""

    split: jit.Kernel
    product: jit.Kernel
    sum: jit.Kernel


def runs_on(limits: jit.DeviceLimits) -> bool:
    """Return whether a device has the instructions and the shared memory."""
    return limits.architecture == "sm_90" and limits.shared_bytes_per_block >= plan.SHARED_BYTES


def text_of(program: tuple[list[str], dict[str, int]]) -> str:
    """Return a program's text."""
    sources, constants = program
    return jit.program_text(sources, constants, {})


@functools.cache
def programs(device: int) -> Programs:
    """Return the kernels of a device, by its index."""

    def load(
        program: tuple[list[str], dict[str, int]], name: str, threads: int, shared: int = 0
    ) -> jit.Kernel:
        return jit.load(
            text_of(program),
            f"hfai_products_{name}",
            device,
            block=threads,
            shared_bytes=shared,
            overlap=True,
            architecture=ARCHITECTURE,
        )

    return Programs(
        load(SPLIT, "split", plan.SPLIT_THREADS, plan.SPLIT_SHARED_BYTES),
        load(PRODUCT, "product", plan.THREADS, plan.SHARED_BYTES),
        load(SUM, "sum", plan.SUM_THREADS),
    )
