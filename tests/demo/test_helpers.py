"""Helpers of `hfai demo --nprocs` are watched, and neither outlive rank 0 nor hold it up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import distributed as dist

import hfreduce
from hfai.demo.helpers import GROUP_SIGNALS, Helpers, _die_with
from hfai.demo.request import HelperError
from hfai.demo.settings import Settings


def started() -> Helpers:
    settings = Settings("tiny", "fp32", 2, 2, 32, 1e-3, 0)
    return Helpers(settings, Path("nowhere"), None, "cpu", 2)


def pid_of(helpers: Helpers) -> int:
    pid = helpers._others.processes[0].pid
    assert pid is not None
    return int(pid)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def blocked_in(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    (line,) = [line for line in status.splitlines() if line.startswith("SigBlk:")]
    return int(line.split()[1], 16)


def test_the_groups_signals_do_not_end_a_helper_that_starts_and_its_death_is_said() -> None:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    helpers = started()
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == before
    pid = pid_of(helpers)
    assert all(blocked_in(pid) >> (number - 1) & 1 for number in GROUP_SIGNALS)
    for number in GROUP_SIGNALS:
        os.kill(pid, number)
    time.sleep(0.1)
    assert helpers._others.processes[0].exitcode is None
    os.kill(pid, signal.SIGKILL)
    with (
        pytest.raises(HelperError, match=r"rank 1 of 2 .* by SIGKILL: the training did not begin"),
        helpers,
    ):
        pass
    assert not dist.is_initialized()


def kill_and_step(helpers: Helpers) -> None:
    with helpers as team:
        os.kill(pid_of(helpers), signal.SIGKILL)
        team.reducer.barrier()


def test_a_helper_that_dies_in_training_is_named_and_all_is_left() -> None:
    with pytest.raises(HelperError, match=r"rank 1 of 2 .* by SIGKILL: the training end") as told:
        kill_and_step(started())
    assert isinstance(told.value.__cause__, hfreduce.PeerError)
    assert not dist.is_initialized()


def test_one_that_does_not_come_is_waited_for_no_longer_than_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    helpers = started()
    os.kill(pid_of(helpers), signal.SIGSTOP)
    monkeypatch.setattr("hfai.demo.helpers.MEETING_SECONDS", 0.2)
    with pytest.raises(HelperError, match="not all of 2 processes came within"), helpers:
        pass
    assert not helpers._others.processes[0].is_alive()


def test_one_that_stops_while_they_meet_is_not_waited_for_either() -> None:
    # The thread that meets stays in torch's call: in a process of its own, which ends all the same.
    code = """
import os, signal
import hfai.demo.helpers as module
from tests.demo.test_helpers import HelperError, pid_of, started
module.MEETING_SECONDS = 0.3
helpers = started()
os.kill(pid_of(helpers), signal.SIGSTOP)
helpers._store.add("ready", 1)
try:
    helpers.__enter__()
except HelperError as error:
    raise SystemExit(str(error))
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 1
    assert "not all of 2 processes came within 0 s: the training did not begin" in done.stderr


def test_the_kernel_kills_a_helper_whose_parent_is_killed() -> None:
    reader, writer = os.pipe()
    middle = os.fork()
    if middle == 0:
        if os.fork() == 0:
            _die_with(os.getppid())
            os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.close(writer)
    assert os.read(reader, 1) == b"x"
    os.kill(middle, signal.SIGKILL)
    os.waitpid(middle, 0)
    os.set_blocking(reader, False)

    def closed() -> bool:
        try:
            return os.read(reader, 1) == b""  # nobody is left who could write
        except BlockingIOError:
            return False

    wait_until(closed)
    os.close(reader)


def test_a_helper_whose_parent_is_gone_ends_at_once() -> None:
    child = os.fork()
    if child == 0:
        _die_with(os.getppid() + 1)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
