"""Progress: nothing for what is quick; a bar on a terminal; lines elsewhere."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

import pytest

SLOW = (
    "import time; from ffrecord.cli.progress import Progress\n"
    "with Progress('verify', 50, after={after}, every=0.05) as progress:\n"
    "    for _ in range(5): progress(10); time.sleep(0.03)\n"
    "import sys; print('rich' in sys.modules)"
)


def run(after: float) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SLOW.format(after=after)], capture_output=True, text=True, check=True
    )


def test_what_is_quick_shows_nothing_and_loads_nothing() -> None:
    done = run(60)
    assert (done.stderr, done.stdout.strip()) == ("", "False")


def test_without_a_terminal_there_are_lines_now_and_then() -> None:
    done = run(0)
    lines = done.stderr.splitlines()
    assert 1 < len(lines) < 5
    assert lines[0] == "ffrecord: verify: 10 of 50"
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(("after", "shown"), [(0, True), (60, False)])
def test_a_terminal_gets_a_bar(after: float, shown: bool) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW.format(after=after)],
        stderr=theirs,
        stdout=subprocess.DEVNULL,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80"},
    )
    os.close(theirs)
    seen = b""
    while True:
        try:
            piece = os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
        if not piece:
            break
        seen += piece
    os.close(ours)
    assert process.wait() == 0
    assert (b"verify" in seen and b"/50" in seen) == shown
