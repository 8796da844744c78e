"""The conformance suite of engines: each implementation passes all of it."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from ffrecord.engine import Engine, RequestError, Requests, ShortReadError
from ffrecord.engines import NAMES, probe

SIZE = 3_000_000


@pytest.fixture(params=NAMES[1:])
def engine(request: pytest.FixtureRequest) -> Engine:
    found = probe()
    if request.param not in found.engines:
        pytest.skip(found.reasons[request.param])
    return found.engines[request.param]


@pytest.fixture(scope="module")
def data() -> list[bytes]:
    source = random.Random(3)
    return [source.randbytes(SIZE), source.randbytes(SIZE // 3)]


@pytest.fixture
def descriptors(tmp_path: Path, data: list[bytes]) -> Iterator[list[int]]:
    opened = []
    for number, content in enumerate(data):
        (tmp_path / str(number)).write_bytes(content)
        opened.append(os.open(tmp_path / str(number), os.O_RDONLY))
        os.fsync(opened[-1])
    yield opened
    for descriptor in opened:
        os.close(descriptor)


def batch(rows: list[tuple[int, int, int]]) -> tuple[Requests, np.ndarray]:
    columns = np.array(rows, np.int64).reshape(len(rows), 3).T.copy()
    ends = np.cumsum(columns[2] + 5)
    arena = np.full(int(ends[-1]) if rows else 0, 0xEE, np.uint8)
    return Requests(columns[0], columns[1], columns[2], ends - columns[2] - 5), arena


def check(engine: Engine, descriptors: list[int], data: list[bytes], rows: list) -> None:
    requests, arena = batch([(descriptors[file], at, length) for file, at, length in rows])
    wanted = [data[file][at : at + length] for file, at, length in rows]
    for descriptor in descriptors:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    sums = engine.read_batch(requests, arena, checksums=True)
    assert sums is not None
    assert sums.tolist() == [zlib.crc32(piece) for piece in wanted]
    for position, piece in zip(requests.positions.tolist(), wanted, strict=True):
        assert arena[position : position + len(piece)].tobytes() == piece
    arena[:] = 0
    assert engine.read_batch(requests, arena, checksums=False) is None
    for position, piece in zip(requests.positions.tolist(), wanted, strict=True):
        assert arena[position : position + len(piece)].tobytes() == piece


def test_random_requests_are_served(
    engine: Engine, descriptors: list[int], data: list[bytes]
) -> None:
    source = random.Random(5)
    for count in (1, 2, 33, 400):
        rows = []
        for _ in range(count):
            file = source.randrange(2)
            at = source.randrange(len(data[file]))
            rows.append((file, at, source.randrange(min(5000, len(data[file]) - at) + 1)))
        check(engine, descriptors, data, rows)


def test_nothing_is_a_batch(engine: Engine, descriptors: list[int], data: list[bytes]) -> None:
    check(engine, descriptors, data, [])
    check(engine, descriptors, data, [(0, 0, 0), (1, 5, 0), (0, SIZE, 0)])


def test_neighbours_duplicates_and_overlaps_are_served(
    engine: Engine, descriptors: list[int], data: list[bytes]
) -> None:
    neighbours = [(0, at, 500) for at in range(0, SIZE, 500)]
    random.Random(1).shuffle(neighbours)
    check(engine, descriptors, data, neighbours)
    check(engine, descriptors, data, [(0, 50, 1000)] * 5 + [(0, 100, 10), (0, 0, 5000), (0, 99, 0)])


def test_a_whole_file_is_one_request(
    engine: Engine, descriptors: list[int], data: list[bytes]
) -> None:
    check(engine, descriptors, data, [(0, 0, SIZE), (1, 0, SIZE // 3), (0, SIZE - 1, 1)])


def test_the_end_of_a_file_is_an_error_that_names_its_request(
    engine: Engine, descriptors: list[int]
) -> None:
    rows = [(descriptors[0], 0, 10), (descriptors[0], SIZE - 5, 6), (descriptors[1], 0, 10)]
    requests, arena = batch(rows)
    with pytest.raises(ShortReadError) as caught:
        engine.read_batch(requests, arena, checksums=True)
    assert caught.value.request == 1
    requests, arena = batch([(descriptors[0], SIZE + 5000, 1)])
    with pytest.raises(ShortReadError):
        engine.read_batch(requests, arena, checksums=True)


def test_a_failing_read_is_an_error_that_names_its_request(
    engine: Engine, descriptors: list[int], tmp_path: Path
) -> None:
    directory = os.open(tmp_path, os.O_RDONLY)
    try:
        requests, arena = batch([(descriptors[0], 0, 10), (directory, 0, 10)])
        with pytest.raises(RequestError) as caught:
            engine.read_batch(requests, arena, checksums=True)
        assert caught.value.request == 1
        assert caught.value.errno == 21
    finally:
        os.close(directory)


def test_a_file_without_direct_or_whole_reads_is_served(engine: Engine) -> None:
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
