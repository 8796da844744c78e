"""The writer of parts: sizes, keys, and a directory that is whole or not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ffrecord import FileReader, PartWriter


def test_parts_end_once_they_have_their_bytes(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "set.ffr", 1000, metadata={"a": 1}) as writer:
        for index in range(10):
            writer.write_one(np.full((10, 10), index, np.float32))  # 400 bytes
    assert (writer.count, writer.files) == (10, 4)
    reader = FileReader(tmp_path / "set.ffr")
    assert [len(reader.get_checksums(k)) for k in range(4)] == [3, 3, 3, 1]
    assert [record.view(np.float32)[0] for record in reader] == list(range(10))
    assert reader.get_metadata(3) == {"a": 1}


def test_keys_are_found_in_any_part(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "set.ffr", 1) as writer:
        for index in range(5):
            writer.write_one(b"x", key=f"k{index}")
    reader = FileReader(tmp_path / "set.ffr")
    assert [reader.index_of(f"k{index}") for index in range(5)] == list(range(5))


def test_nothing_written_is_one_empty_part(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path / "set.ffr")
    writer.close()
    writer.close()
    assert FileReader(tmp_path / "set.ffr").n == 0


@pytest.mark.parametrize("written", [0, 1, 7])
def test_an_exception_leaves_nothing_and_comes_through(written: int, tmp_path: Path) -> None:
    def fail() -> None:
        with PartWriter(tmp_path / "set.ffr", 100) as writer:
            for _ in range(written):
                writer.write_one(b"x" * 60)
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_what_is_no_record_is_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "set.ffr") as writer:
        with pytest.raises(TypeError, match="buffer protocol"):
            writer.write_one("text")  # type: ignore[arg-type]
        writer.write_one(b"x")
    assert FileReader(tmp_path / "set.ffr").n == 1


def test_a_directory_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "set.ffr").mkdir()
    PartWriter(tmp_path / "set.ffr").close()  # an empty one may be filled
    with pytest.raises(FileExistsError, match="not an empty directory"):
        PartWriter(tmp_path / "set.ffr")
    with pytest.raises(ValueError, match="part_bytes is 0"):
        PartWriter(tmp_path / "other.ffr", 0)
    assert [path.name for path in tmp_path.iterdir()] == ["set.ffr"]


LIMITED = """
import resource, signal, sys, ffrecord
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, 2 << 20))
writer = ffrecord.PartWriter(sys.argv[1] + "/set.ffr", 1 << 20)
"""
FINALLY = """
try:
    try:
        for size in (1 << 20, 1 << 20, 3 << 20, 1 << 20): writer.write_one(bytes(size))
    finally: writer.close()
except OSError as error: print(error)
"""
# The record fits, and with the header before it the part does not.
SKIPPING = """
try:
    with writer:
        for size in (1, 1 << 20, 2 << 20, 1, 1, 1):
            try: writer.write_one(bytes(size))
            except OSError: pass
except OSError as error: print(error)
"""


@pytest.mark.parametrize("use", [FINALLY, SKIPPING], ids=["finally", "skipping"])
def test_a_failed_write_never_leaves_a_set_without_it(use: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", LIMITED + use, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "set.ffr gave up after: [Errno 27] File too large" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_a_forked_child_cannot_disturb_its_parent_s_writer(tmp_path: Path) -> None:
    def leave() -> None:
        with writer:
            raise SystemExit

    with PartWriter(tmp_path / "set.ffr", 1) as writer:
        writer.write_one(b"before")
        for use, raises in [
            (lambda: writer.write_one(b"child"), ValueError),
            (writer.close, ValueError),
            (leave, SystemExit),
        ]:
            child = os.fork()
            if child == 0:
                try:
                    use()
                except raises:
                    os._exit(0)
                finally:
                    os._exit(1)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        writer.write_one(b"after")
    assert [bytes(record) for record in FileReader(tmp_path / "set.ffr")] == [b"before", b"after"]
    with pytest.raises(ValueError, match="closed"):
        writer.write_one(b"late")
