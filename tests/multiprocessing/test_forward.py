"""A request to the process that spawned the others reaches them, and their answer comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from hfai.multiprocessing.forward import SIGNALS, Forwarding

SCRIPT = """
import sys, time
from pathlib import Path
import hfai.client, hfai.multiprocessing

def main(local_rank, directory):
    hfai.client.listen()
    Path(directory, f"ready-{local_rank}").touch()
    while not hfai.client.receive_suspend_command():
        time.sleep(0.01)
    Path(directory, f"saved-{local_rank}").touch()
    hfai.client.go_suspend()

if __name__ == "__main__":
    hfai.multiprocessing.spawn(main, args=(sys.argv[1],), nprocs=2, bind_numa=False)
"""


def test_a_signal_to_the_parent_suspends_its_children_and_gives_their_exit_code(
    tmp_path: Path,
) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    command = [sys.executable, script, tmp_path]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        until = time.monotonic() + 60
        while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert process.stderr is not None
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_children_that_never_ask_end_by_the_signal_even_if_it_came_before_them() -> None:
    before = [signal.getsignal(number) for number in SIGNALS]
    with Forwarding() as forwarding:
        os.kill(os.getpid(), signal.SIGTERM)
        children = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
        forwarding.to([child.pid for child in children])
        assert [child.wait(10) for child in children] == [-signal.SIGTERM] * 2
        os.kill(os.getpid(), signal.SIGUSR1)  # to children that are gone: nothing happens
    assert [signal.getsignal(number) for number in SIGNALS] == before


def test_handlers_that_were_there_are_called_and_ignored_signals_stay_ignored() -> None:
    seen: list[int] = []
    before = [
        signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number)),
        signal.signal(signal.SIGUSR1, signal.SIG_IGN),
    ]
    try:
        with Forwarding() as forwarding, subprocess.Popen(["sleep", "60"]) as child:
            forwarding.to([child.pid])
            os.kill(os.getpid(), signal.SIGUSR1)
            assert child.poll() is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert child.wait(10) == -signal.SIGTERM
    finally:
        for number, previous in zip(SIGNALS, before, strict=True):
            signal.signal(number, previous)
    assert seen == [signal.SIGTERM]
