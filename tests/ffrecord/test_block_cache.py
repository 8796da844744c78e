"""The block cache by itself: bounds, damage, killed and concurrent writers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
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
    assert cache.used() == 8 * (BLOCK + 4)
    for number in range(30):
        cache.put("u", "w", number, bytes(BLOCK))
        assert total(tmp_path) <= ROOM


def test_a_bound_below_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cache_bytes is 1000: give"):
        BlockCache(tmp_path, 1000)


def test_what_others_are_writing_counts_and_is_not_written_over_the_bound(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, ROOM)
    writing = [cache._make(cache._path("u", "v", 0).parent, BLOCK + 4) for _ in range(10)]
    assert None not in writing
    cache.put("u", "w", 0, bytes(BLOCK))
    assert cache.get("u", "w", 0) is None
    assert sum(path.stat().st_size for path in tmp_path.rglob(".new-*")) <= ROOM
    assert cache.used() == ROOM


def test_writers_of_the_same_blocks_never_lose_count_of_what_is_there(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, BLOCK + 4)

    def write(first: int, turn: int) -> None:
        for number in range(first, first + 100):
            cache.put("u", "v", number, bytes(60_000 + turn))

    for first in range(0, 1000, 100):
        writers = [threading.Thread(target=write, args=(first, turn)) for turn in range(4)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        assert total(tmp_path) <= cache.used() <= cache.most


def test_a_fork_while_another_thread_has_the_lock_stops_nobody(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path, ROOM)
    has_lock, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with cache._locked():
            has_lock.set()
            go_on.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    has_lock.wait()
    child = os.fork()
    if child == 0:
        signal.pause()
        os._exit(0)
    try:
        go_on.set()
        holder.join()
        other = threading.Thread(target=cache.put, args=("u", "v", 0, b"x"), daemon=True)
        other.start()
        other.join(10)
        assert not other.is_alive()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert cache.get("u", "v", 0) == b"x"


def test_a_directory_removed_under_a_process_is_made_again(tmp_path: Path) -> None:
    cache = BlockCache(tmp_path / "cache", ROOM)
    cache.put("u", "v", 0, bytes(BLOCK))
    shutil.rmtree(tmp_path / "cache")
    assert cache.get("u", "v", 0) is None
    cache.put("u", "v", 1, b"x")
    assert cache.get("u", "v", 1) == b"x"
    assert cache.used() == 5


def test_a_cache_that_fails_is_a_warning_once_and_keeps_its_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = BlockCache(tmp_path / "cache", ROOM)
    cache.put("u", "v", 0, b"x" * 1000)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    with monkeypatch.context() as patch:
        patch.setattr(os, "link", refuse)  # a file system without hard links
        with pytest.warns(UserWarning, match="not kept in the cache .* not permitted"):
            cache.put("u", "v", 1, b"x")
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.put("u", "v", 2, b"x")
    assert cache.used() == 1004
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("no directory any more")
    cache = BlockCache(tmp_path / "other", ROOM)
    cache.directory = tmp_path / "cache"
    with pytest.warns(UserWarning, match="not kept"):
        cache.put("u", "v", 3, b"x")


def test_blocks_have_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        BlockCache(tmp_path, ROOM).put("u", "v", 0, b"x")
    finally:
        os.umask(before)
    (path,) = blocks(tmp_path)
    assert path.stat().st_mode & 0o777 == 0o664
