"""The native part: its checksums, its engines' choice, and what happens where one is forbidden."""

from __future__ import annotations

import os
import platform
import random
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import ffrecord
from ffrecord import FileReader, FileWriter
from ffrecord.engines import NAMES, probe
from tests.ffrecord.conftest import DATA

native = pytest.importorskip("ffrecord._native", reason="the native part was not built")

X86 = platform.machine() == "x86_64"
RINGS = [425]  # io_uring_setup
AIO = [206] if X86 else [0]  # io_setup
THREADS = [56, 435] if X86 else [220, 435]  # clone, clone3
USING_RINGS = [425, 426]
USING_AIO = [206, 208, 209] if X86 else [0, 2, 4]


def forbid(*calls: int) -> str:
    """A program that lets every system call pass but these, which answer "not permitted"."""
    rules = [(0x20, 0, 0, 0)]  # load the call's number
    for left, call in enumerate(reversed(calls)):
        rules.insert(1, (0x15, left + 1, 0, call))  # equal: to the last rule
    rules += [(0x06, 0, 0, 0x7FFF0000), (0x06, 0, 0, 0x00050001)]  # allow; EPERM
    return f"""
import ctypes, struct
libc = ctypes.CDLL(None, use_errno=True)
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in {rules}))
program = struct.pack("HxxxxxxP", {len(rules)}, ctypes.addressof(code))
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.prctl(22, 2, program, 0, 0) == 0
"""


READ = f"""
import ffrecord, os, zlib
path = {str(DATA / "multi.ffr")!r}
for name in os.listdir(path):
    descriptor = os.open(os.path.join(path, name), os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
reader = ffrecord.FileReader(path)
print(reader._engine.name, zlib.crc32(b"".join(r.tobytes() for r in reader.read(range(100)))))
print(ffrecord.explain())
"""
# Every set counts as one that memory cannot hold.
LARGE = "import ffrecord.engines; ffrecord.engines.CACHED_PART = 0\n"


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


@pytest.mark.parametrize("way", native.crc32_ways())
def test_checksums_are_zlib_s(way: str) -> None:
    source = random.Random(11)
    for size in [*range(600), 1023, 1024, 1025, 4095, 4096, 100_003]:
        data = source.randbytes(size)
        assert native.crc32(data, way) == zlib.crc32(data)
    for data in (bytes(1000), b"\xff" * 1000):
        assert native.crc32(data, way) == zlib.crc32(data)


def test_an_unknown_way_to_compute_checksums_is_refused() -> None:
    with pytest.raises(ValueError, match="no such way to compute a checksum: guess"):
        native.crc32(b"abc", "guess")


def test_a_forbidden_ring_leaves_threads_for_small_sets_and_says_why() -> None:
    lines = run(forbid(*RINGS) + READ)
    assert lines[0] == f"threads {expected()}"
    assert "io_uring: a read through io_uring failed: Operation not permitted" in lines


@pytest.mark.skipif("libaio" not in probe().engines, reason="Linux AIO does not work here")
def test_a_forbidden_ring_leaves_linux_aio_for_large_sets() -> None:
    assert run(forbid(*RINGS) + LARGE + READ)[0] == f"libaio {expected()}"


def test_a_forbidden_ring_and_forbidden_aio_leave_threads_and_say_why() -> None:
    lines = run(forbid(*RINGS, *AIO) + LARGE + READ)
    assert lines[0] == f"threads {expected()}"
    assert "libaio: a read through Linux AIO failed: Operation not permitted" in lines
    assert "direct: a read through io_uring failed: Operation not permitted" in lines


def test_where_threads_are_forbidden_too_the_calling_one_reads() -> None:
    lines = run(forbid(*RINGS, *AIO, *THREADS) + LARGE + READ, OPENBLAS_NUM_THREADS="1")
    assert lines[0] == f"threads {expected()}"


@pytest.mark.parametrize(
    ("name", "calls"), [("direct", USING_RINGS), ("io_uring", USING_RINGS), ("libaio", USING_AIO)]
)
@pytest.mark.parametrize("same_thread", [True, False])
def test_a_queue_forbidden_after_the_probe_is_done_without(
    name: str, calls: list[int], same_thread: bool
) -> None:
    if name not in probe().engines:
        pytest.skip(probe().reasons[name])
    program = "import ffrecord.engines; ffrecord.engines.probe()\n" + forbid(*calls)
    if same_thread:  # has a queue that takes nothing any more
        program += READ
    else:  # needs one of its own and cannot have it
        program += "import threading\n" + f"source = {READ!r}\n"
        program += "t = threading.Thread(target=exec, args=(source, {})); t.start(); t.join()"
    assert run(program, FFRECORD_ENGINE=name)[0] == f"{name} {expected()}"


def test_a_missing_native_part_leaves_python_and_says_why() -> None:
    lines = run("import sys; sys.modules['ffrecord._native'] = None\n" + READ)
    assert lines[0] == f"python {expected()}"
    assert any(line.startswith("io_uring: the native part is not there") for line in lines)


@pytest.mark.parametrize("name", NAMES[1:])
def test_an_engine_is_forced_by_the_environment(name: str) -> None:
    if name not in probe().engines:
        pytest.skip(probe().reasons[name])
    assert run(READ, FFRECORD_ENGINE=name)[0] == f"{name} {expected()}"


def test_a_large_cached_batch_is_the_same_with_any_number_of_copying_threads(
    tmp_path: Path,
) -> None:
    source = random.Random(2)
    records = [source.randbytes(source.randrange(60_000)) for _ in range(400)]
    with FileWriter(tmp_path / "a.ffr") as writer:
        writer.write(records)
    with FileReader(tmp_path / "a.ffr") as reader:
        offsets = reader.get_offsets(0)
    lengths = offsets[1:] - offsets[:-1]
    arena = np.empty(int(lengths.sum()), np.uint8)
    positions = np.cumsum(lengths) - lengths
    expected = [zlib.crc32(record) for record in records]
    descriptor = os.open(tmp_path / "a.ffr", os.O_RDONLY)
    keys = np.full(400, descriptor, np.int64)
    try:
        for threads in (0, 1, 2, 7):
            arena[:] = 0
            found = np.zeros(400, np.uint32)
            columns = keys, offsets[:-1], lengths, positions, arena, found
            assert native.read_batch(*columns, True, "threads", False, True, threads) == (-1, 0)
            assert found.tolist() == expected
            assert arena.tobytes() == b"".join(records)
    finally:
        os.close(descriptor)


def test_a_loader_s_worker_copies_with_one_thread() -> None:
    program = (
        "import multiprocessing\n"
        "from ffrecord.native_engine import copying_threads\n"
        "if __name__ == '__main__':\n"
        "    with multiprocessing.get_context('fork').Pool(1) as pool:\n"
        "        print(copying_threads() >= 1, pool.apply(copying_threads))"
    )
    assert run(program) == ["True 1"]


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
