"""Stopping: real signals to real processes."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from hfai.demo.interrupt import SIGNALS, StopRequest

# Says when it is ready, waits for the request, says so, and would then take a minute to end.
WAIT = "time.sleep(0.01)"
LONG_CALL = "hashlib.pbkdf2_hmac('sha256', b'', b'', 100_000_000)"
PROGRAM = """
import hashlib, time
from hfai.demo.interrupt import StopRequest
with StopRequest() as stop:
    print("ready", flush=True)
    while not stop.requested:
        time.sleep(0.01)
    print("stopping", flush=True)
    time.sleep(60)
"""


@contextlib.contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", program]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        # The tests may run in the background of a shell, which then ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("second", SIGNALS)
@pytest.mark.parametrize("first", SIGNALS)
def test_the_first_signal_asks_and_the_second_ends_at_once(
    first: signal.Signals, second: signal.Signals
) -> None:
    with running(PROGRAM) as process:
        process.send_signal(first)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        assert process.poll() is None
        process.send_signal(second)
        assert process.wait(timeout=10) == 128 + second


@pytest.mark.parametrize(
    ("number", "suspended"),
    [(signal.SIGINT, False), (signal.SIGTERM, True), (signal.SIGUSR1, True)],
)
def test_what_a_cluster_engine_sends_asks_to_suspend(
    number: signal.Signals, suspended: bool
) -> None:
    with running(PROGRAM.replace('"stopping"', "stop.suspended")) as process:
        process.send_signal(number)
        assert process.stdout is not None
        assert process.stdout.readline() == f"{suspended}\n"


def test_it_asks_itself_after_a_step_once() -> None:
    program = """
from hfai.demo.interrupt import StopRequest
with StopRequest(suspend_after=2) as stop:
    print("ready", flush=True)
    for step in range(4):
        stop.steps_done = lambda: step
        print(stop.requested, stop.suspended, flush=True)
"""
    with running(program) as process:
        assert process.stdout is not None
        assert process.stdout.read().split("\n") == ["False False"] * 2 + ["True True"] * 2 + [""]


def test_a_long_call_into_c_puts_neither_signal_off() -> None:
    with running(PROGRAM.replace(WAIT, LONG_CALL)) as process:
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130


def test_a_signal_that_a_shell_ignores_stays_ignored() -> None:
    ignoring = f"import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)\n{PROGRAM}"
    with running(ignoring) as process:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        assert process.stdout is not None
        assert process.stdout.readline() == "stopping\n"
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(timeout=0.3)


@pytest.fixture
def _heeding_ctrl_c() -> Iterator[None]:
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.mark.usefixtures("_heeding_ctrl_c")
def test_handlers_are_put_back() -> None:
    threads = threading.active_count()
    before = [signal.getsignal(number) for number in SIGNALS]
    with StopRequest() as stop:
        assert [signal.getsignal(number) for number in SIGNALS] != before
        signal.raise_signal(signal.SIGINT)
        deadline = time.monotonic() + 10
        while not stop.requested and time.monotonic() < deadline:
            time.sleep(0.001)
        assert stop.requested
    assert threading.active_count() == threads
    assert [signal.getsignal(number) for number in SIGNALS] == before
