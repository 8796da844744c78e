"""A configuration whose kernels run on the CPU: their own sources, compiled for the emulator."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

from hfai.kernels import jit
from hfai.kernels.residual_norm.programs import Configuration
from tests.kernels.attention.emulated import ENTRY, EmulatedKernel, _compile
from tests.kernels.rnn.emulated import HERE as RNN

HERE = RNN.parent / "residual_norm"
BLOCKS_AT_ONCE = 3  # of the device that is emulated: fewer than there are rows


def row_sum() -> str:
    """Return common.cuh's sums over the threads of a row, which are what is to be tested."""
    text = (jit.KERNELS / "common.cuh").read_text()
    return text[text.index("// A sum as a binary tree, neighbours first.") :]


class HostKernel(EmulatedKernel):
    """Stands for `jit.Kernel`, its grid-wide limit included."""

    resident_blocks = BLOCKS_AT_ONCE


class HostConfiguration(Configuration):
    """Device -1 is the host."""

    stream = 0  # type: ignore[assignment]

    def _load(
        self,
        sources: list[str],
        constants: dict[str, int | bool],
        name: str,
        block: int,
        shared_bytes: int,
        overlap: bool,
    ) -> Any:
        parts = [f'#include "{HERE / "emulator.hpp"}"', row_sum()]
        parts += [
            f"constexpr {'bool' if isinstance(value, bool) else 'int'} {key} = "
            f"{str(value).lower()};"
            for key, value in constants.items()
        ]
        parts += [
            f"typedef {jit.CUDA_TYPES[dtype]} {key};" for key, dtype in self.types.names().items()
        ]
        parts += [(jit.KERNELS / source).read_text() for source in sources]
        text = re.sub(
            r"extern __shared__ float shared\[\];",
            "float* const shared = emulator::shared_memory();",
            "\n".join(parts),
        )
        # One entry for each kernel of the text, so that it is compiled once.
        generic, entry = ENTRY.split('extern "C"')
        text += generic
        for kernel in re.findall(r"\bhfai_residual_norm_\w+(?=\()", text):
            named = entry.replace("KERNEL", kernel).replace("int run(", f"int run_{kernel}(")
            text += f'extern "C"{named}'
        run = getattr(_compile(text), f"run_hfai_residual_norm_{name}")
        return HostKernel(SimpleNamespace(run=run), block, shared_bytes)  # type: ignore[arg-type]
