"""Memory of batches: used again when the last array is gone, bounded, apart in a forked child."""

from __future__ import annotations

import gc
import os
import threading

import numpy as np
import pytest

native = pytest.importorskip("ffrecord._native", reason="the native part was not built")

MIB = 1 << 20
MOST_IDLE = 64 * MIB


def address(array: np.ndarray) -> int:
    return int(array.__array_interface__["data"][0])


def test_memory_is_used_again_once_no_view_is_left() -> None:
    first = native.empty(3 * MIB)
    view = first[MIB : 2 * MIB]
    place = address(first)
    del first
    view[:] = 7
    second = native.empty(3 * MIB)
    assert address(second) != place
    second[:] = 1
    assert (view == 7).all()
    del view
    assert address(native.empty(3 * MIB)) == place


def test_arrays_are_writable_and_of_the_size_asked_for() -> None:
    for size in (1, 4095, MIB, 5 * MIB + 1):
        array = native.empty(size)
        assert array.shape == (size,)
        assert array.dtype == np.uint8
        assert array.flags.writeable
        array[:] = 255


def test_idle_memory_is_bounded() -> None:
    arrays = [native.empty(20 * MIB) for _ in range(8)]
    large = native.empty(2 * MOST_IDLE)
    del large
    assert native.idle_bytes() <= MOST_IDLE
    del arrays
    gc.collect()
    assert 0 < native.idle_bytes() <= MOST_IDLE


def test_a_forked_child_starts_without_idle_memory_and_keeps_its_arrays() -> None:
    kept = native.empty(MIB)
    kept[:] = 3
    spare = native.empty(8 * MIB)
    del spare
    assert native.idle_bytes() > 0
    child = os.fork()
    if child == 0:
        good = native.idle_bytes() == 0 and bool((kept == 3).all())
        again = native.empty(8 * MIB)
        again[:] = 5
        os._exit(0 if good and bool((kept == 3).all()) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_threads_never_share_a_block() -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(200):
            array = native.empty(MIB + number * 1000 + turn)
            array[::4096] = number
            if (array[::4096] != number).any():
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_than_there_is_is_a_memory_error() -> None:
    with pytest.raises(MemoryError):
        native.empty(1 << 62)
