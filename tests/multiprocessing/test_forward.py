"""A request to the process that spawned the others reaches them, and their answer comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

SCRIPT = """
import sys, time
from pathlib import Path
import hfai.client, hfai.multiprocessing

def main(local_rank, directory, listens):
    if listens:
        hfai.client.listen()
    Path(directory, f"ready-{{local_rank}}").touch()
    while not (listens and hfai.client.receive_suspend_command()):
        time.sleep(0.01)
    Path(directory, f"saved-{{local_rank}}").touch()
    hfai.client.go_suspend()

if __name__ == "__main__":
    hfai.multiprocessing.spawn(main, args=(sys.argv[1], {listens}), nprocs=2, bind_numa=False)
"""


def start(tmp_path: Path, listens: bool) -> subprocess.Popen[str]:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.format(listens=listens))
    process = subprocess.Popen(
        [sys.executable, script, tmp_path], stderr=subprocess.PIPE, text=True
    )
    until = time.monotonic() + 60
    while len(list(tmp_path.glob("ready-*"))) < 2 and time.monotonic() < until:
        time.sleep(0.02)
    return process


def test_a_signal_to_the_parent_suspends_its_children_and_gives_their_exit_code(
    tmp_path: Path,
) -> None:
    with start(tmp_path, listens=True) as process:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75
        assert process.stderr is not None
        errors = process.stderr.read()
    assert "Traceback" not in errors
    assert len(list(tmp_path.glob("saved-*"))) == 2


def test_children_that_never_ask_end_by_the_signal_and_so_does_the_parents_call(
    tmp_path: Path,
) -> None:
    with start(tmp_path, listens=False) as process:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        assert len(children) >= 2
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(60) == 1
        assert process.stderr is not None
        assert "terminated with signal SIGTERM" in process.stderr.read()
    until = time.monotonic() + 30
    while any(Path(f"/proc/{child}").exists() for child in children):
        assert time.monotonic() < until
        time.sleep(0.05)
