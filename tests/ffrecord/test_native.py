"""The native part: its checksums, its engines' choice, and what happens where one is forbidden."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import pytest

import ffrecord
from ffrecord import FileReader, FileWriter
from ffrecord.engines import NAMES, probe
from tests.ffrecord.conftest import DATA

native = pytest.importorskip("ffrecord._native", reason="the native part was not built")

# Lets every system call pass but io_uring_setup, which answers "not permitted".
FORBID_RINGS = """
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
"""
READ = f"""
import ffrecord, zlib
reader = ffrecord.FileReader({str(DATA / "multi.ffr")!r})
print(reader._engine.name, zlib.crc32(b"".join(r.tobytes() for r in reader.read(range(100)))))
print(ffrecord.explain())
"""


def run(program: str, **environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def expected() -> str:
    records = FileReader(DATA / "multi.ffr", engine="python").read(range(100))
    return str(zlib.crc32(b"".join(record.tobytes() for record in records)))


@pytest.mark.parametrize("by_table", [False, True])
def test_checksums_are_zlib_s(by_table: bool) -> None:
    source = random.Random(11)
    for size in [*range(200), 255, 256, 257, 4095, 4096, 100_003]:
        data = source.randbytes(size)
        assert native.crc32(data, by_table) == zlib.crc32(data)
    for data in (bytes(1000), b"\xff" * 1000):
        assert native.crc32(data, by_table) == zlib.crc32(data)


def test_a_forbidden_ring_leaves_threads_and_says_why() -> None:
    lines = run(FORBID_RINGS + READ)
    assert lines[0] == f"threads {expected()}"
    assert "io_uring: a read through io_uring failed: Operation not permitted" in lines


@pytest.mark.skipif("io_uring" not in probe().engines, reason="io_uring does not work here")
def test_a_ring_forbidden_after_the_probe_is_done_without() -> None:
    program = "import ffrecord.engines; ffrecord.engines.probe()\n" + FORBID_RINGS
    # Another thread needs another ring, and cannot have it.
    program += "import threading\n" + f"source = {READ!r}\n"
    program += "t = threading.Thread(target=exec, args=(source, {})); t.start(); t.join()"
    assert run(program, FFRECORD_ENGINE="direct")[0] == f"direct {expected()}"


def test_a_missing_native_part_leaves_python_and_says_why() -> None:
    lines = run("import sys; sys.modules['ffrecord._native'] = None\n" + READ)
    assert lines[0] == f"python {expected()}"
    assert any(line.startswith("io_uring: the native part is not there") for line in lines)


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_engine_is_forced_by_the_environment(name: str) -> None:
    if name not in probe().engines:
        pytest.skip(probe().reasons[name])
    assert run(READ, FFRECORD_ENGINE=name)[0] == f"{name} {expected()}"


def test_a_wrong_name_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="'fast': give one of auto"):
        FileReader(DATA / "basic.ffr", engine="fast")
    monkeypatch.setenv("FFRECORD_ENGINE", "fast")
    with pytest.raises(ValueError, match="FFRECORD_ENGINE is 'fast'"):
        FileReader(DATA / "basic.ffr")


def test_explain_names_every_engine() -> None:
    text = ffrecord.explain()
    assert all(f"\n{name}: " in text for name in NAMES[1:])


@pytest.mark.parametrize("name", NAMES[1:])
def test_cold_reads_survive_forks_and_threads(name: str, tmp_path: Path) -> None:
    if name not in probe().engines:
        pytest.skip(probe().reasons[name])
    records = [random.Random(k).randbytes(k * 37 % 9000) for k in range(500)]
    with FileWriter(tmp_path / "a.ffr") as writer:
        writer.write(records)
    reader = FileReader(tmp_path / "a.ffr", engine=name)
    wrong: list[int] = []

    def work(seed: int) -> None:
        source = random.Random(seed)
        for _ in range(10):
            descriptor = os.open(tmp_path / "a.ffr", os.O_RDONLY)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
            order = source.choices(range(500), k=200)
            if [r.tobytes() for r in reader.read(order)] != [records[i] for i in order]:
                wrong.append(seed)

    work(0)
    children = []
    for seed in (1, 2):
        child = os.fork()
        if child == 0:
            try:
                work(seed)
            except BaseException:
                os._exit(2)
            os._exit(bool(wrong))
        children.append(child)
    for child in children:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    threads = [threading.Thread(target=work, args=(seed,)) for seed in (3, 4, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
