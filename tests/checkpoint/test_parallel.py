"""One function over many items in threads: no thread outlives the call."""

from __future__ import annotations

import signal
import threading
import time

import pytest

from hfai.checkpoint.parallel import in_threads


def test_ctrl_c_waits_for_the_items_that_other_threads_work_on() -> None:
    main, ended, both = threading.get_ident(), threading.Event(), threading.Barrier(2, timeout=20)

    def work(item: int) -> None:
        both.wait()  # so that each thread has one item
        if threading.get_ident() == main:
            return
        time.sleep(0.2)  # the calling thread is waiting for this one by now
        for _ in range(2):
            signal.pthread_kill(main, signal.SIGINT)
            time.sleep(0.2)
        ended.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            in_threads(work, range(2), 2)
        assert ended.is_set()
    finally:
        signal.signal(signal.SIGINT, before)


def test_the_first_error_is_raised_and_ends_all() -> None:
    done: list[int] = []

    def work(item: int) -> None:
        if item == 3:
            raise ValueError("three")
        done.append(item)

    with pytest.raises(ValueError, match="three"):
        in_threads(work, range(10**9), 3)
    assert len(done) < 10**9
