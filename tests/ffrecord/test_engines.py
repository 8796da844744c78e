"""The conformance suite of engines: each implementation passes all of it."""

from __future__ import annotations

import errno
import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from ffrecord.engine import Engine, RequestError, Requests, ShortReadError
from ffrecord.engines import NAMES, for_stores, probe
from ffrecord.store_options import StoreOptions
from tests.ffrecord.weed import Server

# One server for all tests that need it, and one process that has threads of obstore.
pytestmark = pytest.mark.xdist_group("store")

SIZE = 3_000_000


LOCAL = NAMES[1:]
STORES = ("store", "store with a cache")


class Case(NamedTuple):
    """An engine, and what it reads: two sources and one that cannot be read."""

    engine: Engine
    keys: list[int]
    broken: int
    kept: list[Any]  # what must live as long as the keys


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    source = random.Random(3)
    return [source.randbytes(SIZE), source.randbytes(SIZE // 3)]


@pytest.fixture(params=[*LOCAL, *STORES])
def case(request: pytest.FixtureRequest, tmp_path: Path, data: list[bytes]) -> Iterator[Case]:
    if request.param not in LOCAL:
        server = request.getfixturevalue("server")
        cache = tmp_path / "cache" if request.param == "store with a cache" else None
        options = StoreOptions(config=server.config, timeout=10, cache=cache, cache_bytes=8 << 20)
        yield in_store(server, options, data)
        return
    found = probe()
    if request.param not in found.engines:
        pytest.skip(found.reasons[request.param])
    opened = [os.open(tmp_path, os.O_RDONLY)]
    for number, content in enumerate(data):
        (tmp_path / str(number)).write_bytes(content)
        opened.append(os.open(tmp_path / str(number), os.O_RDONLY))
        os.fsync(opened[-1])
    yield Case(found.engines[request.param], opened[1:], opened[0], opened[1:])
    for descriptor in opened:
        os.close(descriptor)


def in_store(server: Server, options: StoreOptions, data: list[bytes]) -> Case:
    from ffrecord.store import StoreObject

    urls = [server.put(f"engines/{number}.ffr", content) for number, content in enumerate(data)]
    objects = [StoreObject(url, options) for url in urls]
    gone = StoreObject(server.put("engines/gone.ffr", b"x" * 100), options)
    server.delete("engines/gone.ffr")
    numbers = [found.number for found in objects]
    return Case(for_stores(options), numbers, gone.number, [*objects, gone])


def batch(rows: list[tuple[int, int, int]]) -> tuple[Requests, np.ndarray]:
    columns = np.array(rows, np.int64).reshape(len(rows), 3).T.copy()
    ends = np.cumsum(columns[2] + 5)
    arena = np.full(int(ends[-1]) if rows else 0, 0xEE, np.uint8)
    return Requests(columns[0], columns[1], columns[2], ends - columns[2] - 5), arena


def check(case: Case, data: list[bytes], rows: list[tuple[int, int, int]]) -> None:
    requests, arena = batch([(case.keys[file], at, length) for file, at, length in rows])
    wanted = [data[file][at : at + length] for file, at, length in rows]
    if case.engine.name != "store":
        for descriptor in case.keys:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    sums = case.engine.read_batch(requests, arena, checksums=True)
    assert sums is not None
    assert sums.tolist() == [zlib.crc32(piece) for piece in wanted]
    for position, piece in zip(requests.positions.tolist(), wanted, strict=True):
        assert arena[position : position + len(piece)].tobytes() == piece
    arena[:] = 0
    assert case.engine.read_batch(requests, arena, checksums=False) is None
    for position, piece in zip(requests.positions.tolist(), wanted, strict=True):
        assert arena[position : position + len(piece)].tobytes() == piece


def test_random_requests_are_served(case: Case, data: list[bytes]) -> None:
    source = random.Random(5)
    for count in (1, 2, 33, 400):
        rows = []
        for _ in range(count):
            file = source.randrange(2)
            at = source.randrange(len(data[file]))
            rows.append((file, at, source.randrange(min(5000, len(data[file]) - at) + 1)))
        check(case, data, rows)


def test_nothing_is_a_batch(case: Case, data: list[bytes]) -> None:
    check(case, data, [])
    check(case, data, [(0, 0, 0), (1, 5, 0), (0, SIZE, 0)])


def test_neighbours_duplicates_and_overlaps_are_served(case: Case, data: list[bytes]) -> None:
    neighbours = [(0, at, 500) for at in range(0, SIZE, 500)]
    random.Random(1).shuffle(neighbours)
    check(case, data, neighbours)
    check(case, data, [(0, 50, 1000)] * 5 + [(0, 100, 10), (0, 0, 5000), (0, 99, 0)])


def test_a_whole_file_is_one_request(case: Case, data: list[bytes]) -> None:
    check(case, data, [(0, 0, SIZE), (1, 0, SIZE // 3), (0, SIZE - 1, 1)])


def test_more_than_a_megabyte_of_small_requests_is_served(case: Case, data: list[bytes]) -> None:
    source = random.Random(9)
    check(case, data, [(0, source.randrange(SIZE - 9000), 9000) for _ in range(700)])


def test_the_end_of_a_file_is_an_error_that_names_its_request(case: Case) -> None:
    rows = [(case.keys[0], 0, 10), (case.keys[0], SIZE - 5, 6), (case.keys[1], 0, 10)]
    requests, arena = batch(rows)
    with pytest.raises(ShortReadError) as caught:
        case.engine.read_batch(requests, arena, checksums=True)
    assert caught.value.request == 1
    requests, arena = batch([(case.keys[0], SIZE + 5000, 1)])
    with pytest.raises(ShortReadError):
        case.engine.read_batch(requests, arena, checksums=True)


def test_a_failing_read_is_an_error_that_names_its_request(case: Case) -> None:
    requests, arena = batch([(case.keys[0], 0, 10), (case.broken, 0, 10)])
    with pytest.raises(RequestError) as caught:
        case.engine.read_batch(requests, arena, checksums=True)
    assert caught.value.request == 1
    assert caught.value.errno == (errno.ENOENT if case.engine.name == "store" else errno.EISDIR)


def test_memory_for_a_batch_is_writable_and_of_the_size_asked_for(case: Case) -> None:
    for size in (0, 1, 70_000, 3 << 20):
        memory = case.engine.empty(size)
        assert memory.shape == (size,)
        assert memory.dtype == np.uint8
        memory[:] = 1


@pytest.mark.parametrize("name", LOCAL)
def test_a_file_without_direct_or_whole_reads_is_served(name: str) -> None:
    if name not in probe().engines:
        pytest.skip(probe().reasons[name])
    engine = probe().engines[name]
    # The kernel gives this file a page at a time, refuses O_DIRECT, and cannot say what is cached.
    path = Path("/sys/kernel/btf/vmlinux")
    if not path.exists():
        pytest.skip("no file of that kind here")
    content = path.read_bytes()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        source = random.Random(2)
        rows = [(0, source.randrange(len(content) - 20_000), 20_000) for _ in range(50)]
        rows += [(0, at, 3000) for at in range(0, 90_000, 3000)]
        requests, arena = batch([(descriptor, at, length) for _, at, length in rows])
        sums = engine.read_batch(requests, arena, checksums=True)
    finally:
        os.close(descriptor)
    assert sums is not None
    assert sums.tolist() == [zlib.crc32(content[at : at + length]) for _, at, length in rows]
