"""Scripts that tests run in processes of their own, and send signals to."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import IO


@contextlib.contextmanager
def running(program: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run a program in a process group of its own, once it has printed "ready"."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    with subprocess.Popen(
        [sys.executable, "-u", "-c", program],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        start_new_session=True,
    ) as process:
        try:
            said = output(process).readline()
            assert said == "ready\n", said + errors(process).read()
            yield process
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def output(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdout is not None
    return process.stdout


def errors(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stderr is not None
    return process.stderr


def end(process: subprocess.Popen[str], timeout: float = 30.0) -> tuple[int, str, str]:
    """Wait for a process: exit code, the rest of standard output, standard error.

    Whoever has not ended by then is killed, and the exit code says so. Not `communicate`, which
    leaves out what has been read ahead behind a line.
    """
    alarm = threading.Timer(timeout, process.kill)
    alarm.start()
    out, err = output(process).read(), errors(process).read()
    alarm.cancel()
    return process.wait(), out, err
