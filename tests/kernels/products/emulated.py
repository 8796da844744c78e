"""Run the products' own CUDA sources on the CPU (machine.hpp), in place of loaded kernels."""

from __future__ import annotations

import re
from pathlib import Path

from hfai.kernels import jit
from hfai.kernels.products import plan
from hfai.kernels.products.programs import PRODUCT, SPLIT, SUM, Programs
from tests.kernels.attention.emulated import ENTRY, EmulatedKernel, _compile

HERE = Path(__file__).parent
STANDS_IN_FOR = ("warpgroup.cuh", "products/machine.cuh")


def load(
    program: tuple[list[str], dict[str, int]], name: str, block: int, shared_bytes: int = 0
) -> EmulatedKernel:
    """Compile a program for the CPU; kept for the session."""
    sources, constants = program
    parts = [f'#include "{HERE / "machine.hpp"}"']
    parts += [f"constexpr int {constant} = {value};" for constant, value in constants.items()]
    for source in sources:
        if source not in STANDS_IN_FOR:
            parts += [f'#line 1 "{source}"', (jit.KERNELS / source).read_text()]
    text = re.sub(
        r"extern __shared__ (?:__align__\(1024\) )?(float|char) (\w+)\[\];",
        r"#define \2 (reinterpret_cast<\1*>(start_of_shared()))",
        "\n".join(parts),
    )
    # Of one block: the emulator's blocks take turns.
    text = re.sub(
        r"__shared__ float (\w+)(\[\w+\])(\[\w+\]);",
        r"float (&\1)\2\3 = *reinterpret_cast<float (*)\2\3>(start_of_shared());",
        text,
    )
    return EmulatedKernel(
        _compile(text + ENTRY.replace("KERNEL", name)), block, shared_bytes + 1024
    )


class _Resident(EmulatedKernel):
    """A kernel of which a device runs so many blocks at once."""

    resident_blocks = 3  # fewer than there are tiles, so that blocks take several


def emulated_programs() -> Programs:
    """Return the three kernels."""
    product = load(PRODUCT, "hfai_products_product", plan.THREADS, plan.SHARED_BYTES)
    product.__class__ = _Resident
    return Programs(
        load(SPLIT, "hfai_products_split", plan.SPLIT_THREADS, plan.SPLIT_SHARED_BYTES),  # type: ignore[arg-type]
        product,  # type: ignore[arg-type]
        load(SUM, "hfai_products_sum", plan.SUM_THREADS),  # type: ignore[arg-type]
    )
