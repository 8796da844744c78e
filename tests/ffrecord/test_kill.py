"""A writer killed at any moment leaves the old file, the new one, or none: nothing in between."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from ffrecord import FileReader
from tests.ffrecord.independent import file_of, read_file

# A long campaign: FFRECORD_KILL_ROUNDS=400 pytest --timeout=0 tests/ffrecord/test_kill.py
ROUNDS = int(os.environ.get("FFRECORD_KILL_ROUNDS", "20"))

WRITER = """
import sys
from ffrecord import FileWriter
path, n = sys.argv[1], int(sys.argv[2]) or None
print("ready", flush=True)
while True:
    with FileWriter(path, n) as writer:
        for index in range(400):
            writer.write_one(index.to_bytes(4, "little") * 2000)
"""


def test_a_killed_writer_leaves_no_plausible_file(tmp_path: Path) -> None:
    source = random.Random()
    new = [index.to_bytes(4, "little") * 2000 for index in range(400)]
    interrupted = 0
    for turn in range(ROUNDS):
        directory = tmp_path / f"turn{turn}.ffr"
        directory.mkdir()
        path = directory / "a.ffr"
        old = [b"old"] if turn % 2 else None
        if old:
            path.write_bytes(file_of(old))
        process = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), "400" if turn % 4 < 2 else "0"],
            stdout=subprocess.PIPE,
        )
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(source.uniform(0, 0.03))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        interrupted += any(directory.glob(".*"))
        names = [found.name for found in directory.glob("*.ffr")]
        assert names in ([], ["a.ffr"])
        if old:
            assert names
        if names:
            assert read_file(path) in (new, old)
            FileReader(directory).validate(deep=True)
    assert interrupted


PARTS_WRITER = """
import sys, itertools
from ffrecord import PartWriter
print("ready", flush=True)
for turn in itertools.count():
    with PartWriter(f"{sys.argv[1]}/set{turn}.ffr", 200_000) as writer:
        for index in range(100):
            writer.write_one(index.to_bytes(4, "little") * 2000)
"""


def test_a_killed_writer_of_parts_leaves_whole_directories_only(tmp_path: Path) -> None:
    source = random.Random()
    whole = [index.to_bytes(4, "little") * 2000 for index in range(100)]
    found = 0
    for turn in range(max(1, ROUNDS // 4)):
        directory = tmp_path / f"turn{turn}"
        directory.mkdir()
        process = subprocess.Popen(
            [sys.executable, "-c", PARTS_WRITER, str(directory)], stdout=subprocess.PIPE
        )
        assert process.stdout is not None
        process.stdout.readline()
        while turn == 0 and not (directory / "set0.ffr").exists():
            time.sleep(0.001)
        time.sleep(source.uniform(0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        for path in directory.glob("*.ffr"):
            assert [record.tobytes() for record in FileReader(path)] == whole
            found += 1
        assert all(path.name.startswith((".", "set")) for path in directory.iterdir())
    assert found
