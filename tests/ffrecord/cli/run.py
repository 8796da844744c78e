"""Runs the `ffrecord` command as its users do, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = "import sys; from ffrecord.cli import main; sys.argv[0] = 'ffrecord'; main()"


def ffrecord(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)], capture_output=True, check=False
    )


def figures(*arguments: object) -> dict[str, object]:
    """What a command prints with --json."""
    done = ffrecord(*arguments, "--json")
    assert done.returncode == 0, done.stderr
    loaded: dict[str, object] = json.loads(done.stdout)
    return loaded
