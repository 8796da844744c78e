"""The block cache by itself: bounds, damage, killed and concurrent writers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ffrecord.block_cache import BLOCK, BlockCache

ROOM = 10 * (BLOCK + 4)


def blocks(directory: Path) -> list[Path]:
    return sorted(path for path in directory.rglob("*-*") if path.is_file())


def total(directory: Path) -> int:
    return sum(path.stat().st_size for path in blocks(directory))


def test_what_was_put_is_got_and_nothing_else(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "new" / "cache", ROOM)
    cache.put("s3://a/b", "v1", 3, b"x" * 1000)
    assert cache.get("s3://a/b", "v1", 3) == b"x" * 1000
    for url, version, number in [
        ("s3://a/c", "v1", 3),
        ("s3://a/b", "v2", 3),
        ("s3://a/b", "v1", 4),
    ]:
        assert cache.get(url, version, number) is None


def test_the_bound_holds_and_the_least_recently_used_go_first(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, ROOM)
    for number in range(10):
        cache.put("u", "v", number, bytes([number]) * BLOCK)
        os.utime(blocks(tmp_path)[0] if number == 0 else newest(tmp_path), (number, number))
    assert cache.get("u", "v", 0) == bytes(BLOCK)  # used now
    for number in range(10, 40):
        cache.put("u", "v", number, bytes([number]) * BLOCK)
        assert total(tmp_path) <= ROOM
        assert cache.used() <= ROOM
        if number == 10:
            assert cache.get("u", "v", 0) is not None
            assert cache.get("u", "v", 1) is None
    assert cache.get("u", "v", 39) == bytes([39]) * BLOCK


def newest(directory: Path) -> Path:
    return max(blocks(directory), key=lambda path: path.stat().st_mtime_ns)


@pytest.mark.parametrize("damage", ["flip", "cut", "empty"])
def test_a_damaged_block_is_not_there(tmp_path: Path, damage: str) -> None:
    cache = BlockCache(tmp_path, ROOM)
    cache.put("u", "v", 0, b"right" * 100)
    (path,) = blocks(tmp_path)
    content = bytearray(path.read_bytes())
    content[10] ^= 1
    path.write_bytes({"flip": bytes(content), "cut": content[:-9], "empty": b""}[damage])
    assert cache.get("u", "v", 0) is None
    cache.put("u", "v", 0, b"right" * 100)
    assert cache.get("u", "v", 0) == b"right" * 100


def test_writers_that_are_killed_leave_a_cache_that_works(tmp_path: Path) -> None:
    program = f"""
import os
from ffrecord.block_cache import BLOCK, BlockCache
cache = BlockCache({str(tmp_path)!r}, {ROOM})
print(flush=True)
number = 0
while True:
    cache.put("u", "v", number % 50, bytes([number % 50]) * BLOCK)
    number += 1
"""
    for turn in range(6):
        running = [
            subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
            for _ in range(2)
        ]
        for process in running:
            assert process.stdout
            process.stdout.readline()
        time.sleep(0.03 * turn)
        for process in running:
            process.send_signal(signal.SIGKILL)
            process.communicate()
    cache = BlockCache(tmp_path, ROOM)
    for number in range(50):
        found = cache.get("u", "v", number)
        assert found in (None, bytes([number]) * BLOCK)
        cache.put("u", "v", number, bytes([number]) * BLOCK)
        assert cache.get("u", "v", number) == bytes([number]) * BLOCK
    assert total(tmp_path) <= ROOM


def test_a_counter_that_was_lost_does_not_matter(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, ROOM)
    for number in range(8):
        cache.put("u", "v", number, bytes(BLOCK))
    (tmp_path / "bytes").write_bytes(b"nonsense")
    assert cache.used() == 0
    for number in range(30):
        cache.put("u", "w", number, bytes(BLOCK))
    assert total(tmp_path) <= 2 * ROOM


def test_a_bound_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_bytes is 1000: give"):
        BlockCache(tmp_path, 1000)
