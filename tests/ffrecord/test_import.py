"""What importing ffrecord costs and leaves alone, looked at in a process of its own."""

from __future__ import annotations

import subprocess
import sys


def test_reading_needs_neither_torch_nor_a_thread() -> None:
    program = (
        "import sys, threading, os, ffrecord\n"
        "for name in ffrecord.__all__: getattr(ffrecord, name)\n"
        "assert set(ffrecord.__all__) <= set(dir(ffrecord))\n"
        "print('torch' in sys.modules, 'hfai' in sys.modules, len(os.listdir('/proc/self/task')))"
    )
    # numpy's own threads are not ours.
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"},
    )
    assert done.stdout.split() == ["False", "False", "1"]


def test_the_parts_for_torch_are_there_after_a_plain_import() -> None:
    program = (
        "import ffrecord; print(ffrecord.torch.Dataset.__name__, ffrecord.utils.dump.__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["Dataset", "dump"]
