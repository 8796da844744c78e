"""Files written and read natively: the same bytes, hashes and errors as Python's way."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash

from hfai import checkpoint
from hfai.checkpoint.parallel import in_threads
from hfai.checkpoint.storage import Failure, Run, local_files
from hfai.checkpoint.storage.local_files import LocalFile, LocalSink
from tests.checkpoint.test_manager import in_child

CHUNK = 4096
native = pytest.mark.skipif(local_files.native is None, reason="the native part was not built")


@pytest.fixture(params=["native", "python"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Both ways, one after the other."""
    if request.param == "python":
        monkeypatch.setattr(local_files, "native", None)
    elif local_files.native is None:
        pytest.skip("the native part was not built")
    return request.param


def hashes_of(data: bytes, chunk: int = CHUNK) -> str:
    return "".join(
        xxhash.xxh3_64_hexdigest(data[at : at + chunk]) for at in range(0, len(data), chunk)
    )


def aligned(size: int) -> memoryview:
    """Memory that begins at a page."""
    return memoryview(mmap.mmap(-1, max(size, 1)))[:size]


def test_any_sizes_are_written_with_their_hashes(way: str, tmp_path: Path) -> None:
    random.seed(0)
    for trial in range(40):
        sizes = [random.choice((0, 1, 7, 240, 241, 4096, 70_000, 1_100_000)) for _ in range(9)]
        parts = [random.randbytes(size) for size in sizes]
        begin = random.choice((0, 1, 4096, 12_345))
        sink = LocalSink(tmp_path / "a", random.choice((0, begin + sum(sizes))), trial % 2 == 0)
        found = sink.write_hashed(begin, [memoryview(part) for part in parts])
        sink.close()
        assert found == [xxhash.xxh3_64_hexdigest(part) for part in parts]
        assert (tmp_path / "a").read_bytes() == bytes(begin) + b"".join(parts)


def test_thousands_of_small_views_are_one_piece_of_the_file(way: str, tmp_path: Path) -> None:
    parts = [bytes([n % 251]) * (n % 5) for n in range(5000)]
    sink = LocalSink(tmp_path / "a")
    assert len(sink.write_hashed(0, [memoryview(part) for part in parts])) == 5000
    sink.close()
    assert (tmp_path / "a").read_bytes() == b"".join(parts)


@pytest.mark.parametrize("size", [4096, 8192 + 5, (5 << 20) + 4096, (5 << 20) + 77])
@pytest.mark.parametrize("begin", [0, 4096, 4097])
def test_direct_writes_mix_with_others_in_one_file(
    size: int, begin: int, way: str, tmp_path: Path
) -> None:
    memory = aligned(size)
    memory[:] = random.randbytes(size)
    sink = LocalSink(tmp_path / "a", 6 << 20, direct=True)
    sink.write(0, [memoryview(b"h" * begin)])
    found = sink.write_hashed(begin, [memory[: size // 2], memory[size // 2 :]])
    after = sink.write_hashed(begin + size, [memoryview(b"tail")])
    sink.close()
    assert found == [
        xxhash.xxh3_64_hexdigest(part) for part in (memory[: size // 2], memory[size // 2 :])
    ]
    assert after == [xxhash.xxh3_64_hexdigest(b"tail")]
    assert (tmp_path / "a").read_bytes() == b"h" * begin + bytes(memory) + b"tail"


@native
@pytest.mark.skipif(not hasattr(os, "RWF_NOWAIT"), reason="this Python cannot ask the page cache")
def test_direct_writes_leave_the_page_cache_alone(tmp_path: Path) -> None:
    memory = aligned(2 << 20)
    for direct in (False, True):
        path = tmp_path / f"{direct}"
        sink = LocalSink(path, len(memory), direct)
        if direct and sink._direct < 0:
            pytest.skip("this file system has no direct I/O")
        sink.write_hashed(0, [memory])
        sink.close()
        descriptor = os.open(path, os.O_RDONLY)
        try:
            done = os.preadv(descriptor, [bytearray(4096)], 1 << 20, os.RWF_NOWAIT)
        except BlockingIOError:
            done = 0
        finally:
            os.close(descriptor)
        assert (done == 0) == direct


def test_threads_write_one_file_directly(tmp_path: Path) -> None:
    memory = aligned(8 << 20)
    memory[:] = random.randbytes(len(memory))
    sink = LocalSink(tmp_path / "a", len(memory), direct=True)
    part = len(memory) // 8

    def write(number: int) -> None:
        sink.write_hashed(number * part, [memory[number * part : (number + 1) * part]])

    threads = [threading.Thread(target=write, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    sink.close()
    assert (tmp_path / "a").read_bytes() == memory


def runs_of(data: bytes, places: list[tuple[int, int]]) -> list[Run]:
    return [
        Run(begin, memoryview(bytearray(end - begin)), hashes_of(data[begin:end]))
        for begin, end in places
    ]


def test_runs_of_any_size_are_filled_and_compared(way: str, tmp_path: Path) -> None:
    random.seed(1)
    data = random.randbytes(3_000_000)
    (tmp_path / "a").write_bytes(data)
    file = LocalFile(tmp_path / "a")
    for _ in range(30):
        cuts = sorted(random.sample(range(len(data) + 1), random.choice((2, 5, 300))))
        places = list(itertools.pairwise(cuts))
        if random.random() < 0.5:
            places = [place for place in places if random.random() < 0.7] or places
        runs = runs_of(data, places)
        if random.random() < 0.3:
            runs = [run._replace(hashes=random.choice((run.hashes, ""))) for run in runs]
        assert file.read_runs(runs, CHUNK) is None
        assert all(run.view == data[run.offset : run.offset + len(run.view)] for run in runs)
    file.close()


@pytest.mark.parametrize("where", [0, 1, 4095, 4096, 9_999])
@pytest.mark.parametrize("together", [True, False])
def test_a_changed_byte_is_found_in_its_run_and_chunk(
    where: int, together: bool, way: str, tmp_path: Path
) -> None:
    data = random.randbytes(20_000)
    places = [(0, 10_000), (10_000, 20_000)] if together else [(10_000, 20_000)]
    runs = runs_of(data, places)
    changed = bytearray(data)
    changed[10_000 + where] ^= 1
    (tmp_path / "a").write_bytes(changed)
    chunk = where // CHUNK
    begin = 10_000 + chunk * CHUNK
    expected = xxhash.xxh3_64_hexdigest(changed[begin : min(begin + CHUNK, 20_000)])
    found = LocalFile(tmp_path / "a").read_runs(runs, CHUNK)
    assert found == Failure(len(places) - 1, chunk, expected, None)


def test_a_file_that_ends_is_said_of_the_run_that_it_ends_in(way: str, tmp_path: Path) -> None:
    data = random.randbytes(10_000)
    (tmp_path / "a").write_bytes(data[:9000])
    apart = runs_of(data, [(0, 4096), (5000, 9000), (9500, 10_000)])
    found = LocalFile(tmp_path / "a").read_runs(apart, CHUNK)
    assert found is not None
    assert found.run == 2
    assert isinstance(found.error, EOFError)


@native
def test_of_runs_that_are_read_together_the_one_that_is_cut_is_named(tmp_path: Path) -> None:
    data = random.randbytes(10_000)
    (tmp_path / "a").write_bytes(data[:9000])
    together = runs_of(data, [(0, 4096), (4096, 8192), (8192, 10_000)])
    found = LocalFile(tmp_path / "a").read_runs(together, CHUNK)
    assert found is not None
    assert found.run == 2
    assert isinstance(found.error, EOFError)


@native
def test_what_makes_no_sense_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 100)
    descriptor = os.open(tmp_path / "a", os.O_RDONLY)
    read: Any = local_files.native.read
    try:
        with pytest.raises(BufferError):
            read(descriptor, [0], [b"read-only"], [], CHUNK)
        with pytest.raises(ValueError, match="differ in length"):
            read(descriptor, [0, 1], [bytearray(3)], [], CHUNK)
        with pytest.raises(ValueError, match="another number of hashes"):
            read(descriptor, [0], [bytearray(3)], ["0" * 32], CHUNK)
        with pytest.raises(ValueError, match="negative"):
            read(descriptor, [-1], [bytearray(3)], [], CHUNK)
        with pytest.raises(ValueError, match="chunk is 0"):
            read(descriptor, [0], [bytearray(3)], [], 0)
        with pytest.raises(TypeError):
            read(descriptor, [0], [3], [], CHUNK)
    finally:
        os.close(descriptor)


def test_errors_of_the_disk_name_the_file(way: str, tmp_path: Path) -> None:
    path = tmp_path / "a"

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        sink = LocalSink(path)
        with pytest.raises(OSError, match="too large") as caught:
            sink.write_hashed(0, [memoryview(bytes(2 << 20))])
        assert caught.value.filename == str(path)

    assert in_child(work) == 0


@native
def test_a_disk_that_is_too_small_says_so_before_anything_is_written(tmp_path: Path) -> None:
    if local_files.native.is_in_memory(os.open(tmp_path, os.O_RDONLY)):
        pytest.skip("files in memory are not reserved")
    with pytest.raises(OSError, match=r"space|too large") as caught:
        LocalSink(tmp_path / "a", 1 << 50)
    assert caught.value.filename == str(tmp_path / "a")
    assert (tmp_path / "a").stat().st_blocks == 0


@pytest.fixture(params=[True, False, None], ids=["huge", "small", "quicker"])
def in_memory(request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory on tmpfs, whose files are made of huge pages, of small ones, or as is quicker."""
    base = Path("/dev/shm")
    if local_files.native is None or not os.access(base, os.W_OK):
        pytest.skip("needs the native part and /dev/shm")
    local_files.native.force_huge_pages(request.param)
    with tempfile.TemporaryDirectory(dir=base) as directory:
        yield Path(directory)
    local_files.native.force_huge_pages(None)


def test_files_in_memory_have_what_was_written_whatever_their_pages(in_memory: Path) -> None:
    random.seed(3)
    data = memoryview(random.randbytes(9 << 20))
    for _ in range(6):
        begin = random.choice((0, 4096, (2 << 20) - 1, 5000))
        parts, at = [], 0
        while at < len(data):
            size = random.choice((0, 1, 7, 4096, 70_001, 3 << 20))
            parts.append(data[at : at + size])
            at += size
        sink = LocalSink(in_memory / "a")
        found = sink.write_hashed(begin, parts)
        sink.close()
        assert found == [xxhash.xxh3_64_hexdigest(part) for part in parts]
        assert (in_memory / "a").read_bytes() == bytes(begin) + bytes(data)
    # Threads, on parts that meet within a huge page.
    sink = LocalSink(in_memory / "b")
    step = (3 << 20) + 12_345
    spans = range(0, len(data), step)
    in_threads(lambda at: sink.write_hashed(at, [data[at : at + step]]), spans, 3)
    sink.close()
    assert (in_memory / "b").read_bytes() == data


@native
def test_memory_that_is_full_is_an_error_and_no_signal(tmp_path: Path) -> None:
    script = """
import errno, sys
from pathlib import Path
from hfai.checkpoint.storage.local_files import LocalSink, native
data = bytes(8 << 20)
for huge in (True, False):
    native.force_huge_pages(huge)
    sink = LocalSink(Path(sys.argv[1], "a"))
    assert len(sink.write_hashed(0, [memoryview(data)])) == 1
    try:
        sink.write_hashed(len(data), [memoryview(data)])
    except OSError as error:
        assert error.errno == errno.ENOSPC, error
        print("full")
    sink.abandon()
    Path(sys.argv[1], "a").unlink()
"""
    mount = 'mount -t tmpfs -o size=13m none "$1" || exit 77; exec "$2" -c "$3" "$1"'
    ran = subprocess.run(
        ["unshare", "-rm", "sh", "-c", mount, "sh", str(tmp_path), sys.executable, script],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    if ran.returncode in (1, 77) and "full" not in ran.stdout and "rror" not in ran.stderr:
        pytest.skip("no file system can be mounted here")
    assert ran.stdout.split() == ["full", "full"], ran.stderr


def test_a_fork_during_native_calls_harms_neither(tmp_path: Path) -> None:
    data = memoryview(random.randbytes(32 << 20))
    stop = threading.Event()
    sink = LocalSink(tmp_path / "a", len(data))
    hashes: list[list[str]] = []

    def write() -> None:
        while not stop.is_set():
            hashes.append(sink.write_hashed(0, [data]))

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for number in range(5):
            path = tmp_path / f"child{number}"
            assert in_child(lambda path=path: checkpoint.save(path, {"w": torch.ones(9)})) == 0
            assert checkpoint.load(path)["model"]["w"].sum() == 9
    finally:
        stop.set()
        thread.join()
    sink.close()
    assert {tuple(found) for found in hashes} == {(xxhash.xxh3_64_hexdigest(data),)}


@native
def test_both_ways_write_the_same_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {"a": torch.randn(3_000_000), "b": torch.randn(1500), "c": torch.randn(3)}
    checkpoint.save(tmp_path / "native", state, rng=False)
    monkeypatch.setattr(local_files, "native", None)
    checkpoint.save(tmp_path / "python", state, rng=False)
    first, second = (tmp_path / way / "rank-00000.safetensors" for way in ("native", "python"))
    assert first.stat().st_size == second.stat().st_size
    begin = int.from_bytes(first.read_bytes()[:8], "little") + 8  # behind the generation
    assert first.read_bytes()[begin:] == second.read_bytes()[begin:]
    for name in ("native", "python"):
        loaded = checkpoint.load(tmp_path / name)["model"]
        assert all(torch.equal(loaded[key], state[key]) for key in state)
