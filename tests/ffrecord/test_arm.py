"""The native part compiles for 64-bit Arm, and computes zlib's checksums there under emulation.

Needs a cross compiler (aarch64-linux-gnu-g++, or the command in FFRECORD_ARM_CXX, for example
"python -m ziglang c++ -target aarch64-linux-musl"), and qemu-user to run what it made.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import zlib
from pathlib import Path

import pytest

NATIVE = Path(__file__).resolve().parents[2] / "src" / "ffrecord" / "native"
PROGRAM = """
#include <cstdio>
#include <vector>
#include "queue.hpp"
#include "cached.hpp"
int main() {
  std::vector<uint8_t> data(100003);
  for (size_t i = 0; i < data.size(); ++i) data[i] = static_cast<uint8_t>(i * i >> 3);
  for (const ffrecord::CrcWay &way : ffrecord::kCrcWays)
    if (way.works())
      for (size_t size : {0, 1, 7, 8, 9, 4096, 100003})
        printf("%s|%zu|%u\\n", way.name, size, ~way.update(data.data(), size, ~0u));
}
"""


def compiler() -> list[str] | None:
    if given := os.environ.get("FFRECORD_ARM_CXX"):
        return shlex.split(given)
    found = shutil.which("aarch64-linux-gnu-g++")
    return [found] if found else None


def test_the_native_part_compiles_for_arm_and_its_checksums_are_zlib_s(tmp_path: Path) -> None:
    command = compiler()
    if command is None:
        pytest.skip("no compiler for Arm here: aarch64-linux-gnu-g++, or one in FFRECORD_ARM_CXX")
    source, program = tmp_path / "arm.cpp", tmp_path / "arm"
    source.write_text(PROGRAM)
    flags = ["-static", "-std=c++17", "-O2", "-Wall", "-Werror", f"-I{NATIVE}", "-pthread"]
    subprocess.run([*command, *flags, str(source), "-o", str(program)], check=True)
    emulator = shutil.which("qemu-aarch64-static") or shutil.which("qemu-aarch64")
    if emulator is None:
        pytest.skip("compiled; no qemu-user here to run it")
    done = subprocess.run([emulator, str(program)], capture_output=True, text=True, check=True)
    rows = [line.split("|") for line in done.stdout.splitlines()]
    data = bytes(i * i >> 3 & 255 for i in range(100_003))
    assert {name for name, _, _ in rows} == {"Arm CRC instructions", "tables"}
    for _, size, found in rows:
        assert int(found) == zlib.crc32(data[: int(size)])
