"""Run the attention kernels' own CUDA sources on the CPU (emulator.hpp), on torch tensors."""

from __future__ import annotations

import ctypes
import functools
import re
import struct
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from hfai.kernels import jit
from tests.kernels.rnn.emulated import COMPILER, FLAGS

HERE = Path(__file__).parent
STANDS_IN_FOR = ("tensor_cores.cuh", "warpgroup.cuh")
ENTRY = """
template <class A> A argument(u64 raw) {
  if constexpr (std::is_pointer_v<A>) return reinterpret_cast<A>(raw);
  else if constexpr (std::is_same_v<A, float>) return __uint_as_float(static_cast<u32>(raw));
  else return static_cast<A>(raw);
}
template <class... A, size_t... I>
int start(void (*kernel)(A...), int grid, int block, size_t shared_bytes, const u64* raw,
          std::index_sequence<I...>) {
  return emulator::run(grid, block, shared_bytes, [=] { kernel(argument<A>(raw[I])...); });
}
template <class... A>
int start(void (*kernel)(A...), int grid, int block, size_t shared_bytes, const u64* raw,
          int count) {
  if (count != sizeof...(A)) return 2;
  return start(kernel, grid, block, shared_bytes, raw, std::index_sequence_for<A...>());
}
extern "C" int run(int grid, int block, size_t shared_bytes, const u64* raw, int count) {
  return start(KERNEL, grid, block, shared_bytes, raw, count);
}
"""


class EmulatedKernel:
    """Stands for a loaded kernel: its launches are runs of the emulator, and must end."""

    def __init__(self, library: ctypes.CDLL, block: int, shared_bytes: int) -> None:
        self._run = library.run
        self._block = block
        self._shared_bytes = shared_bytes

    def launch(self, grid: int, stream: int, *arguments: int | float) -> None:
        """Run `grid` blocks with a kernel's arguments, as jit.Kernel.launch packs them."""
        raw = (ctypes.c_uint64 * len(arguments))()
        for i, argument in enumerate(arguments):
            if isinstance(argument, float):
                raw[i] = struct.unpack("<I", struct.pack("<f", argument))[0]
            else:
                raw[i] = argument & (1 << 64) - 1
        result = self._run(
            grid, self._block, ctypes.c_size_t(self._shared_bytes), raw, len(arguments)
        )
        assert result == 0, {1: "threads wait forever", 2: "the number of arguments differs"}[
            result
        ]


def load(
    sources: Sequence[str],
    constants: Mapping[str, int | bool],
    types: Mapping[str, torch.dtype],
    kernel: str,
    block: int,
    shared_bytes: int,
) -> EmulatedKernel:
    """Compile a program for the CPU; kept for the session."""
    lines = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in constants.items()
    ]
    parts = [f'#include "{HERE / "emulator.hpp"}"', *lines]
    parts += [f"typedef {jit.CUDA_TYPES[dtype]} {name};" for name, dtype in types.items()]
    parts.append(f'#include "{HERE / "warpgroup.hpp"}"')
    for source in sources:
        if source not in STANDS_IN_FOR:
            parts += [f'#line 1 "{source}"', (jit.KERNELS / source).read_text()]
    text = "\n".join(parts)
    text, found = re.subn(
        r"extern __shared__ (__align__\(1024\) )?float shared\[\];.*",
        "#define shared (reinterpret_cast<float*>(start_of_shared()))",
        text,
    )
    assert found == 1
    run_entry = ENTRY.replace("KERNEL", kernel)
    return EmulatedKernel(_compile(text + run_entry), block, shared_bytes + 1024)  # to align it


@functools.cache
def _compile(text: str) -> ctypes.CDLL:
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        subprocess.run([COMPILER, *FLAGS, "-o", str(library), str(source)], check=True)
        return ctypes.CDLL(str(library))
