"""Calls run in the order they are made, in the caller's thread where nothing is before them."""

from __future__ import annotations

import threading
import time

import pytest

from hfreduce.worker import Worker


def test_a_lone_call_runs_in_the_callers_thread_and_starts_none() -> None:
    worker, seen = Worker("test"), []
    worker.call(lambda: seen.append(threading.current_thread()))
    assert seen == [threading.current_thread()]
    assert not any(thread.name == "test" for thread in threading.enumerate())
    worker.close()


def test_a_call_waits_for_those_before_it() -> None:
    worker, order = Worker("test"), []

    def slow() -> None:
        time.sleep(0.1)
        order.append("submitted")

    worker.submit(slow)
    worker.call(lambda: order.append("called"))
    assert order == ["submitted", "called"]
    worker.close()


def test_errors_reach_who_waits_and_the_thread_goes_on() -> None:
    worker = Worker("test")
    failed = worker.submit(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    later = worker.submit(lambda: None)
    with pytest.raises(ZeroDivisionError):
        failed.result()
    assert later.result() is None
    with pytest.raises(ZeroDivisionError):
        worker.call(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
    worker.call(lambda: None)
    worker.close()


def test_close_waits_for_what_runs_and_leaves_no_thread() -> None:
    worker, done = Worker("test"), []

    def slow() -> None:
        time.sleep(0.1)
        done.append(True)

    worker.submit(slow)
    caller = threading.Thread(target=lambda: worker.call(slow))
    caller.start()
    worker.close()
    assert len(done) >= 1
    caller.join()
    assert not any(thread.name == "test" for thread in threading.enumerate())
