"""What `FileWriter` promises, the faults of the original's writer among them."""

from __future__ import annotations

import array
import errno
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffrecord import FileReader, FileWriter, PartWriter
from tests.ffrecord.independent import file_of, read_file


@settings(max_examples=40, deadline=None)
@given(st.lists(st.binary(max_size=200), max_size=30), st.booleans())
def test_any_records_are_read_back_by_an_independent_reader(
    tmp_path_factory: pytest.TempPathFactory, records: list[bytes], streaming: bool
) -> None:
    path = tmp_path_factory.mktemp("any") / "any.ffr"
    with FileWriter(path, None if streaming else len(records)) as writer:
        writer.write(records)
    assert read_file(path) == records
    assert path.read_bytes() == file_of(records)
    assert [record.tobytes() for record in FileReader(path)] == records


@pytest.mark.parametrize(
    "buffer",
    [
        np.arange(10, dtype=np.int32),
        np.arange(24, dtype=np.float64).reshape(2, 3, 4),
        np.arange(24, dtype=np.int16).reshape(4, 6).T,
        np.arange(100, dtype=np.uint8)[::-3],
        np.arange(6, dtype=">i4"),
        np.zeros(3, dtype=[("O", "i4"), ("b", "f8")]),
        np.array(7, dtype=np.int64),
        np.empty((0, 5), np.float32),
        np.arange(1 << 19, dtype=np.int32),
        np.array(["2020-02-03", "2021"], "M8[D]"),
        np.arange(6, dtype="m8[s]").reshape(2, 3)[:, ::2],
        array.array("d", [1.0, 2.0]),
        bytearray(b"abc"),
        memoryview(b"abcdef")[::2],
    ],
    ids=lambda buffer: type(buffer).__name__,
)
def test_all_bytes_of_a_buffer_are_written_in_its_own_order(buffer: object, tmp_path: Path) -> None:
    with FileWriter(tmp_path / "one.ffr", 1) as writer:
        writer.write_one(buffer)  # type: ignore[arg-type]
    expected = buffer.tobytes() if hasattr(buffer, "tobytes") else bytes(buffer)  # type: ignore
    assert read_file(tmp_path / "one.ffr") == [expected]


@pytest.mark.parametrize("thing", ["text", 3, None, np.array([{}]), np.zeros(2, [("a", "O")])])
def test_what_has_no_bytes_is_refused_and_the_writer_goes_on(thing: object, tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer:
        with pytest.raises(TypeError, match="encode"):
            writer.write_one(thing)  # type: ignore[arg-type]
        writer.write_one(b"good")
    assert read_file(tmp_path / "a.ffr") == [b"good"]


def test_large_records_and_small_ones_keep_their_order(tmp_path: Path) -> None:
    records = [b"a" * 10, b"b" * (3 << 20), b"", b"c" * 100, b"d" * (1 << 20), b"e"]
    for n in (None, len(records)):
        with FileWriter(tmp_path / "mixed.ffr", n) as writer:
            writer.write(records)
            assert writer.count == len(records)
        assert read_file(tmp_path / "mixed.ffr") == records


def test_fewer_records_than_promised_leave_no_file(tmp_path: Path) -> None:
    with (
        pytest.raises(ValueError, match="promised 3 records and got 1"),
        FileWriter(tmp_path / "a.ffr", 3) as writer,
    ):
        writer.write_one(b"x")
    assert list(tmp_path.iterdir()) == []


def test_more_records_than_promised_are_refused(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr", 1) as writer:
        writer.write_one(b"x")
        with pytest.raises(ValueError, match="promised 1"):
            writer.write_one(b"y")
    assert read_file(tmp_path / "a.ffr") == [b"x"]


@pytest.mark.parametrize("n", [None, 3])
def test_the_user_s_exception_comes_through_and_the_old_file_stays(
    n: int | None, tmp_path: Path
) -> None:
    (tmp_path / "a.ffr").write_bytes(file_of([b"old"]))

    def fail() -> None:
        with FileWriter(tmp_path / "a.ffr", n) as writer:
            writer.write_one(b"new")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]
    assert read_file(tmp_path / "a.ffr") == [b"old"]


def test_a_writer_that_is_dropped_half_way_harms_nobody(tmp_path: Path) -> None:
    script = (
        "import sys, ffrecord\n"
        "w = ffrecord.FileWriter(sys.argv[1] + '/a.ffr', 3); w.write_one(b'x'); del w\n"
        "w = ffrecord.FileWriter(sys.argv[1] + '/b.ffr', 3); w.write_one(b'x')\n"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path)]).returncode == 0
    assert list(tmp_path.iterdir()) == []


def test_the_mode_follows_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        FileWriter(tmp_path / "a.ffr").close()
    finally:
        os.umask(before)
    assert (tmp_path / "a.ffr").stat().st_mode & 0o777 == 0o640


def test_nothing_has_the_final_name_before_close(tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "a.ffr", 1)
    writer.write_one(b"x")
    assert not [path for path in tmp_path.iterdir() if path.suffix == ".ffr"]
    writer.close()
    writer.close()
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]
    with pytest.raises(ValueError, match="closed"):
        writer.write_one(b"y")


def test_a_full_disk_is_an_error_and_leaves_nothing(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys, ffrecord\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 21, 1 << 21))\n"
        "try:\n"
        "    with ffrecord.FileWriter(sys.argv[1] + '/a.ffr', int(sys.argv[2]) or None) as w:\n"
        "        for _ in range(50): w.write_one(bytes(1 << 17))\n"
        "except OSError as error: print(error.errno)\n"
    )
    for n in ("50", "0"):
        command = [sys.executable, "-c", script, str(tmp_path), n]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        assert done.stdout.split() == ["27"]
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("n", [None, 2])
def test_a_forked_child_cannot_disturb_its_parent_s_writer(n: int | None, tmp_path: Path) -> None:
    writer = FileWriter(tmp_path / "a.ffr", n)
    writer.write_one(b"before")
    child = os.fork()
    if child == 0:
        try:
            writer.write_one(b"child")
        except ValueError:
            del writer
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    writer.write_one(b"after")
    writer.close()
    assert read_file(tmp_path / "a.ffr") == [b"before", b"after"]


def test_wrong_names_and_numbers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"ends with \.ffr"):
        FileWriter(tmp_path / "a.bin")
    with pytest.raises(ValueError, match="-1"):
        FileWriter(tmp_path / "a.ffr", -1)
    with pytest.raises(FileNotFoundError) as caught:
        FileWriter(tmp_path / "no" / "a.ffr")
    assert caught.value.filename == str(tmp_path / "no" / "a.ffr")
    (tmp_path / "dir.ffr").mkdir()
    with pytest.raises(IsADirectoryError):
        FileWriter(tmp_path / "dir.ffr")
    assert [path.name for path in tmp_path.iterdir()] == ["dir.ffr"]


def test_a_failed_write_that_was_caught_is_an_error_at_close_too(tmp_path: Path) -> None:
    script = (
        "import resource, signal, sys, ffrecord\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))\n"
        "try:\n"
        "    with ffrecord.FileWriter(sys.argv[1] + '/a.ffr') as w:\n"
        "        for _ in range(2):\n"
        "            try: w.write_one(bytes(2 << 20))\n"
        "            except OSError as error: print(error)\n"
        "except OSError as error: print('close:', error)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    first, second, close = done.stdout.splitlines()
    assert "File too large" in first
    assert second.endswith(f"a.ffr gave up after: {first}")
    assert close == f"close: {second}"
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_may_not_be_read_takes_files_all_the_same() -> None:
    # Not below pytest's own directory, which other users may not enter.
    with tempfile.TemporaryDirectory() as base:
        os.chmod(base, 0o755)
        drop = Path(base, "drop")
        drop.mkdir()
        drop.chmod(0o333)
        child = os.fork()
        if child == 0:
            try:
                if os.getuid() == 0:
                    os.setuid(65534)
                FileWriter(drop / "a.ffr").close()
                PartWriter(drop / "set").close()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        drop.chmod(0o755)
        assert {path.name for path in drop.iterdir()} == {"a.ffr", "set"}


def test_a_file_system_that_cannot_flush_directories_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush = os.fsync

    def refuse(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", refuse)
    FileWriter(tmp_path / "a.ffr").close()
    PartWriter(tmp_path / "set").close()
    assert {path.name for path in tmp_path.iterdir()} == {"a.ffr", "set"}


def test_a_file_system_that_cannot_copy_in_the_kernel_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(95, "not supported")

    records = [os.urandom(700_000) for _ in range(4)]
    for replacement in (refuse, lambda *_: 0):
        monkeypatch.setattr(os, "copy_file_range", replacement)
        with FileWriter(tmp_path / "a.ffr") as writer:
            writer.write(records)
        assert read_file(tmp_path / "a.ffr") == records
