"""Buffers that are made ahead: within the budget, by threads that end, in a forked child too."""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfai import checkpoint
from hfai.checkpoint.format import Slice, lay_out
from hfai.checkpoint.page_locked import touched
from hfai.checkpoint.preparing import prepare_pool, segments_of
from hfai.checkpoint.shard import SEGMENT, segments
from hfai.checkpoint.staging import HostPool
from tests.checkpoint.test_manager import in_child

# What `expect` is given on a GPU, short of the call to CUDA.
make = functools.partial(touched, SEGMENT)


def makers() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name == "hfai-checkpoint-buffers"]


def slowly(made: list[float], seconds: float) -> Callable[[], torch.Tensor]:
    """Return what makes a buffer in so many seconds, and notes when it began."""

    def make_slowly() -> torch.Tensor:
        made.append(time.perf_counter())
        time.sleep(seconds)
        return make()

    return make_slowly


def test_prepared_buffers_are_as_many_as_wanted_and_within_the_budget() -> None:
    pool = HostPool(4 * SEGMENT)
    pool.expect(2, make, hurried=False)
    assert pool.wait_prepared(60)
    assert pool.allocated == 2 * SEGMENT
    pool.expect(100, make, hurried=False)
    assert pool.wait_prepared(60)
    assert pool.allocated == 4 * SEGMENT
    for thread in makers():
        thread.join(60)
    assert not makers()
    buffers = [pool.acquire() for _ in range(4)]
    assert len({b.data_ptr() for b in buffers if b is not None}) == 4
    assert all(b is not None and b.data_ptr() % 4096 == 0 and not b.any() for b in buffers)
    assert pool.acquire(lambda: True) is None
    del buffers
    pool.trim()


def test_a_thread_that_prepares_rests_as_long_as_it_works() -> None:
    begins: list[float] = []
    pool = HostPool(4 * SEGMENT)
    pool.expect(4, slowly(begins, 0.05), hurried=False)
    assert pool._makers == 1
    assert pool.wait_prepared(60)
    assert all(after - before >= 0.1 for before, after in itertools.pairwise(begins))


def test_a_save_hurries_the_preparation_and_uses_what_is_there() -> None:
    begins: list[float] = []
    pool = HostPool(8 * SEGMENT)
    pool.expect(8, slowly(begins, 0.05), hurried=False)
    for _ in range(20):  # two go round and round while the others are made
        first, second = pool.acquire(), pool.acquire()
        assert first is not None
        assert second is not None
        pool.release(first)
        pool.release(second)
    kept = [pool.acquire() for _ in range(8)]
    assert all(buffer is not None for buffer in kept)
    # Unhurried it is one each 0.1 s.
    assert begins[-1] - begins[0] < 0.1 * 7 or len(os.sched_getaffinity(0)) == 1
    assert pool.allocated == 8 * SEGMENT


def test_what_cannot_be_locked_is_said_once_and_ordinary_memory_takes_its_place() -> None:
    left = 2

    def refuse() -> torch.Tensor:
        nonlocal left
        left -= 1
        if left < 0:
            raise RuntimeError("CUDA does not lock it: out of memory (2)")
        return make()

    pool = HostPool(5 * SEGMENT)

    def use() -> list[torch.Tensor | None]:
        pool.expect(5, refuse, hurried=False)
        assert pool.wait_prepared(60)
        pool.expect(5, refuse)
        assert pool.wait_prepared(60)
        return [pool.acquire() for _ in range(5)]

    with pytest.warns(UserWarning, match="not page-locked beyond .*out of memory") as found:
        buffers = use()
    assert len(found) == 1
    assert all(buffer is not None and len(buffer) == SEGMENT for buffer in buffers)
    assert pool.allocated == 5 * SEGMENT


def test_memory_that_is_not_there_is_an_error_in_words() -> None:
    with pytest.raises(MemoryError, match=f"no {1 << 60} bytes of host memory"):
        touched(1 << 60)


def test_trimming_ends_the_preparation() -> None:
    begins: list[float] = []
    pool = HostPool(50 * SEGMENT)
    pool.expect(50, slowly(begins, 0.02), hurried=False)
    while pool.allocated < 2 * SEGMENT:
        time.sleep(0.001)
    pool.trim()
    assert pool.wait_prepared(60)
    assert pool.allocated == 0
    assert len(begins) < 10
    assert pool.acquire() is not None, "it can be used again"


def test_a_pool_that_nobody_has_is_prepared_no_further() -> None:
    begins: list[float] = []
    pool = HostPool(50 * SEGMENT)
    pool.expect(50, slowly(begins, 0.02), hurried=False)
    del pool
    for thread in makers():
        thread.join(60)
    assert not makers()
    assert len(begins) < 10


def test_a_script_that_ends_waits_for_no_preparation() -> None:
    script = """
import time
from hfai.checkpoint.page_locked import touched
from hfai.checkpoint.staging import HostPool
pool = HostPool(1000 << 25)
pool.expect(1000, lambda: time.sleep(0.05) or touched(4096), hurried=False)
while not pool.allocated:
    time.sleep(0.01)
print(time.time())
"""
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert not ran.stderr
    assert time.time() - float(ran.stdout) < 10  # all buffers take 100 s


def test_a_forked_child_has_a_pool_of_its_own() -> None:
    pool = HostPool(3 * SEGMENT)
    pool.expect(3, slowly([], 0.05), hurried=False)
    while pool.allocated < 2 * SEGMENT:
        time.sleep(0.001)

    def child() -> None:
        assert pool.allocated == 0
        buffers = [pool.acquire() for _ in range(3)]
        for buffer in buffers:
            assert buffer is not None
            buffer.fill_(7)
        assert pool.allocated == 3 * SEGMENT
        pool.trim()

    assert in_child(child) == 0
    kept = [pool.acquire() for _ in range(3)]
    assert all(buffer is not None and not buffer.any() for buffer in kept)


def test_as_many_buffers_are_expected_as_a_file_has_segments(tmp_path: Path) -> None:
    shapes = [(4096, 4096), (5000, 3000), (4096,), (7,), (2000, 1001), (6, 5_000_000)]
    tensors = {f"t{at}": torch.empty(shape) for at, shape in enumerate(shapes)}
    slices = [
        Slice(name, "float32", tuple(t.shape), (0,) * t.ndim, tuple(t.shape), 0, t.nbytes, "")
        for name, t in tensors.items()
    ]
    count = len(list(segments(lay_out(slices, "0" * 16, 0))))
    assert abs(segments_of(t.nbytes for t in tensors.values()) - count) <= 1


def test_nothing_is_prepared_where_nothing_is_on_a_gpu(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    pool = checkpoint.prepare(model, optimizer)
    with checkpoint.CheckpointManager(tmp_path, every=1) as manager:
        assert manager.resume(model, optimizer) is None
        manager.prepare(model, optimizer)
        for one in (pool, manager._pool):
            assert one.wait_prepared(0), "no thread makes anything"
            assert one.allocated == 0
    with pytest.raises(ValueError, match="closed"):
        manager.prepare(model)
    with pytest.raises(ValueError, match="two buffers"):
        checkpoint.prepare(model, host_budget=1)
    with pytest.raises(TypeError, match="the model is a int"):
        prepare_pool(pool, 3, None, 1)
