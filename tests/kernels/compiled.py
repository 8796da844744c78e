"""Compile kernels for a GPU that is not there, and read what the assembler says of them."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from hfai.kernels import jit

# One of each kind that we claim to run on: Ampere, Ada, Hopper, Blackwell. Multiprocessors, shared
# memory a block may ask for and clusters as in NVIDIA's CUDA C++ programming guide.
DEVICES = {
    "sm_80": jit.DeviceLimits("sm_80", 108, 163 * 1024, 1),
    "sm_89": jit.DeviceLimits("sm_89", 128, 99 * 1024, 1),
    "sm_90": jit.DeviceLimits("sm_90", 132, 227 * 1024, 8),
    "sm_100": jit.DeviceLimits("sm_100", 148, 227 * 1024, 8),
}


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers, bytes of stack and spilled, static shared memory in bytes.

    A stack without spills is an array that the compiler could not keep in registers.
    """

    registers: int
    stack: int
    spilled: int
    shared: int


class _Log:
    def __init__(self) -> None:
        self.text = ""

    def write(self, text: str) -> None:
        self.text += text


def resources(text: str, architecture: str) -> dict[str, Resources]:
    """Compile a program and return the resources of each kernel in it, by name."""
    log = _Log()
    # NVRTC keeps binaries too, and says nothing of one that it takes from there.
    unique = f"__device__ int hfai_{uuid.uuid4().hex};\n"
    jit.compile_to_cubin(text + unique, architecture, cache=False, log=log)
    assert "warning" not in log.text, log.text
    assert "Potential Performance Loss" not in log.text, (
        log.text
    )  # products that wait for each other
    found = {}
    for part in log.text.split("Compiling entry function '")[1:]:
        used = re.search(r"Used (\d+) registers", part)
        stack = re.search(r"(\d+) bytes stack frame", part)
        spilled = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", part)
        shared = re.search(r"(\d+) bytes smem", part)
        assert used is not None, part
        assert stack is not None, part
        assert spilled is not None, part
        found[part.split("'")[0]] = Resources(
            int(used[1]), int(stack[1]), int(spilled[1]), int(shared[1]) if shared else 0
        )
    assert found, log.text
    return found
