"""What moves: plain lines into a file, one live line on a real terminal."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys

import pytest
from rich.console import Console

from hfai.demo.progress import Progress, format_duration

PROGRAM = """
from rich.console import Console
from hfai.demo.progress import Progress
with Progress(Console()) as progress:
    progress.begin("training", "step", 1000, tokens=64)
    for step in range(1000):
        progress.advance("loss 2.345")
    progress.say("a line of its own")
"""


def test_into_a_file_go_the_first_and_the_last_line_and_few_between() -> None:
    file = io.StringIO()
    with Progress(Console(file=file, width=60)) as progress:
        progress.begin("training", "step", 1000, tokens=64)
        for _ in range(1000):
            progress.advance("loss 2.345")
    lines = file.getvalue().splitlines()
    assert lines[0].startswith("training: step    1/1000  loss 2.345")
    assert re.fullmatch(
        r"training: step 1000/1000  loss 2.345  [\d,]+ tokens/s  0:00 left", lines[-1]
    )
    assert len(lines) < 5
    assert "\x1b" not in file.getvalue()


def test_a_resumed_phase_starts_where_it_was() -> None:
    file = io.StringIO()
    with Progress(Console(file=file)) as progress:
        progress.begin("training", "step", 10, done=9)
        progress.advance()
    assert file.getvalue().startswith("training: step 10/10  0:00 left")


def test_on_a_terminal_one_line_is_redrawn_and_the_cursor_comes_back() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm-256color", "COLUMNS": "100"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=theirs, env=environment) as done:
        os.close(theirs)
        output = b""
        try:
            while chunk := os.read(ours, 65536):
                output += chunk
        except OSError:  # how Linux tells that the other end of a terminal is closed
            pass
        os.close(ours)
    assert done.returncode == 0
    shown = output.decode()
    assert "step 1000/1000  loss 2.345" in shown
    assert "a line of its own" in shown
    assert shown.count("\n") < 6
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0:00"), (59.6, "1:00"), (125, "2:05"), (3725, "1:02:05")]
)
def test_durations_read_like_a_clock(seconds: float, expected: str) -> None:
    assert format_duration(seconds) == expected
