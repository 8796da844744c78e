"""The native launcher where there is no GPU; tests/gpu has it at work."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

_launch = pytest.importorskip(
    "hfai.kernels._launch", reason="the native launcher was not built for this interpreter"
)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver here")
def test_without_a_driver_a_launch_says_so() -> None:
    with pytest.raises(RuntimeError, match="NVIDIA's driver"):
        _launch.launch(0, 0, 32, 0, 1, False, 1, 0, 1, 2.0)


def test_arguments_of_the_wrong_kind_are_a_type_error() -> None:
    with pytest.raises(TypeError):
        _launch.launch("kernel")
    with pytest.raises((TypeError, RuntimeError)):
        _launch.launch(0, 0, 32, 0, 1, False, 1, 0, "a string")


FAKE_DRIVER = """
#include <unistd.h>
int ok() { return 0; }
int cuLaunchKernel() { sleep(1); return 0; }
int cuLaunchKernelEx() { return 0; }
int cuGetErrorString() { return 0; }
int cuCtxGetCurrent(void** context) { *context = (void*)1; return 0; }
int cuCtxSetCurrent() { return 0; }
int cuDevicePrimaryCtxRetain() { return 0; }
"""
COUNT_WHILE_LAUNCHING = """
import threading, time
from hfai.kernels import _launch
launching = threading.Thread(target=_launch.launch, args=(1, 0, 32, 0, 1, False, 1, 0, 1))
launching.start()
turns = 0
while launching.is_alive():
    time.sleep(0.01)
    turns += 1
print(turns)
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_a_launch_that_waits_for_the_device_lets_other_threads_run(tmp_path: Path) -> None:
    # A driver whose queue is full waits; what would empty the queue may be a Python thread.
    (tmp_path / "driver.c").write_text(FAKE_DRIVER)
    library = tmp_path / "libcuda.so.1"
    command = ["cc", "-shared", "-fPIC", "-w", "-o", str(library), str(tmp_path / "driver.c")]
    subprocess.run(command, check=True)
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COUNT_WHILE_LAUNCHING],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 20
