"""Calls run in the order they are made, in the caller's thread where nothing is before them."""

from __future__ import annotations

import signal
import threading
import time
from concurrent.futures import Future

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


def test_it_is_idle_when_all_jobs_have_run_in_their_callbacks_too() -> None:
    worker, seen, go = Worker("test"), [], threading.Event()
    assert worker.is_idle
    future: Future[None] = Future()
    future.add_done_callback(lambda _: seen.append(worker.is_idle))
    assert worker.submit(lambda: go.wait(20) and None, future) is future
    assert not worker.is_idle
    go.set()
    future.result(20)
    worker.close()
    assert seen == [True]


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


def test_a_callback_may_submit_and_call_and_what_was_queued_comes_first() -> None:
    worker, order, go = Worker("test"), list[str](), threading.Event()

    def callback(_: Future[None]) -> None:
        worker.submit(lambda: order.append("nested")).result()
        worker.call(lambda: order.append("called"))

    first = worker.submit(lambda: go.wait(10) and order.append("first"))  # type: ignore[arg-type, return-value, func-returns-value]
    first.add_done_callback(callback)
    worker.submit(lambda: order.append("second"))
    last = worker.submit(lambda: order.append("third"))
    go.set()
    last.result(10)
    worker.close()
    assert order == ["first", "second", "third", "nested", "called"]


def test_a_callback_waits_for_the_call_that_another_thread_makes() -> None:
    worker, order = Worker("test"), list[str]()
    told, ended = threading.Event(), threading.Event()

    def callback(_: Future[None]) -> None:
        told.wait(10)
        worker.call(lambda: order.append("nested"))
        ended.set()

    def slow() -> None:
        told.set()
        time.sleep(0.2)
        order.append("called")

    first = worker.submit(lambda: None)
    first.add_done_callback(callback)
    first.result(10)
    worker.call(slow)
    assert ended.wait(10)
    worker.close()
    assert order == ["called", "nested"]


def test_a_signals_handler_may_close_in_the_middle_of_submit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, stop, done = Worker("test"), threading.Event(), list[str]()
    worker.submit(lambda: stop.wait(10) and None)

    def handler(*_: object) -> None:
        stop.set()
        worker.close()

    class Interrupted(Future):  # type: ignore[type-arg]
        def __init__(self) -> None:
            signal.raise_signal(signal.SIGALRM)
            super().__init__()

    kept = signal.signal(signal.SIGALRM, handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr("hfreduce.worker.Future", Interrupted)
            submitter = worker.submit(lambda: done.append("late"))
    finally:
        signal.signal(signal.SIGALRM, kept)
    submitter.result(10)
    assert done == ["late"]
    assert not any(thread.name == "test" for thread in threading.enumerate())


def test_a_job_that_comes_as_a_handler_closes_is_still_answered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    worker, done = Worker("test"), list[str]()
    worker.submit(lambda: None).result()
    put = worker._jobs

    class Closing:
        def put(self, entry: object) -> None:
            monkeypatch.setattr(worker, "_jobs", put)
            worker.close()  # between the check and the queue, as a handler might
            put.put(entry)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "_jobs", Closing())
    worker.submit(lambda: done.append("late")).result(10)
    assert done == ["late"]
    assert not any(thread.name == "test" for thread in threading.enumerate())
