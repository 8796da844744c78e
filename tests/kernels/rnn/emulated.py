"""Compile a kernel's CUDA source for the CPU (emulator.hpp) and run it on torch tensors."""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from hfai.kernels import jit

HERE = Path(__file__).parent
COMPILER = shutil.which("g++")
FLAGS = ["-std=c++17", "-O1", "-fno-strict-aliasing", "-ffp-contract=off", "-U_FORTIFY_SOURCE"]
FLAGS += ["-shared", "-fPIC", "-w"]
STANDS_IN_FOR = ("tensor_cores.cuh", "rnn/machine.cuh", "rnn/cluster_machine.cuh")


class Emulated:
    """One kernel of a program, to be run with tensors and integers as its arguments."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._run = library.run
        self._library = library

    def mute(self, block: int) -> None:
        """Lose what `block` stores into the shared memory of its cluster; -1: of no block."""
        ctypes.c_int.in_dll(self._library, "muted_block").value = block

    def __call__(
        self, grid: int, block: int, shared_bytes: int, *arguments: Tensor | int | None
    ) -> bool:
        """Run `grid` blocks of `block` threads; return False where they waited forever."""
        raw = (ctypes.c_uint64 * len(arguments))()
        for i, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                assert argument.device.type == "cpu"
                raw[i] = argument.data_ptr()
            else:
                raw[i] = argument or 0
        return self._run(grid, block, ctypes.c_size_t(shared_bytes), raw) == 0


def emulated(
    sources: list[str], constants: Mapping[str, int | bool], dtype: torch.dtype, kernel: str
) -> Emulated:
    """Compile `kernel` of a program for the CPU; kept for the session."""
    lines = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in constants.items()
    ]
    parts = [f'#include "{HERE / "emulator.hpp"}"', *lines]
    parts.append(f"typedef {jit.CUDA_TYPES[dtype]} T;")
    for source in sources:
        if source not in STANDS_IN_FOR:
            parts += [f'#line 1 "{source}"', (jit.KERNELS / source).read_text()]
    text = "\n".join(parts)
    text = re.sub(
        r"extern __shared__ float (\w+)\[\];", r"#define \1 (emulator::shared_memory())", text
    )
    text += """
template <class A> A argument(u64 raw) {
  if constexpr (std::is_pointer_v<A>) return reinterpret_cast<A>(raw);
  else return static_cast<A>(raw);
}
template <class... A, size_t... I>
int start(void (*kernel)(A...), int grid, int block, size_t shared, const u64* raw,
          std::index_sequence<I...>) {
  return emulator::run(grid, block, shared, [=] { kernel(argument<A>(raw[I])...); });
}
template <class... A>
int start(void (*kernel)(A...), int grid, int block, size_t shared, const u64* raw) {
  return start(kernel, grid, block, shared, raw, std::index_sequence_for<A...>());
}
"""
    text += (
        'extern "C" int run(int grid, int block, size_t shared, const u64* raw) '
        f"{{ return start({kernel}, grid, block, shared, raw); }}\n"
    )
    return _compile(text)


@functools.cache
def _compile(text: str) -> Emulated:
    assert COMPILER is not None
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernel.cpp", Path(folder) / "kernel.so"
        source.write_text(text)
        subprocess.run(
            [COMPILER, *FLAGS, "-o", str(library), str(source)],
            check=True,
        )
        return Emulated(ctypes.CDLL(str(library)))
