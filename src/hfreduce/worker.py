"""Calls in the order they were made, whether the caller waits or not.

A call that the caller waits for runs in the caller's own thread if nothing is before it: handing it
over would cost more than a small all-reduce. The rest runs in one thread, which starts with the
first asynchronous call and ends with `close`.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

Job = Callable[[], None]


class Worker:
    """Runs jobs one after the other."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.RLock()  # a signal's handler may close what it interrupts
        self._inside = self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._waiting = 0
        self._thread: threading.Thread | None = None

    def call(self, job: Job) -> None:
        """Run a job after those before it, and return when it is done.

        Raises:
            RuntimeError: A signal's handler called it in the middle of another call.
        """
        with self._lock:
            if self._inside:
                raise RuntimeError("a signal's handler cannot call a collective within another")
            if not self._waiting:
                self._inside = True
                try:
                    job()
                finally:
                    self._inside = False
                return
            future = self._queue(job)
        future.result()

    def submit(self, job: Job) -> Future[None]:
        """Run a job after those before it, and return at once."""
        with self._lock:
            return self._queue(job)

    def close(self) -> None:
        """Let the thread end after the jobs that it has, and return when none is running."""
        with self._lock:
            self._closed = True
            thread, self._thread = self._thread, None
        self._jobs.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join()
        with self._lock:  # until a call in another thread's own hands has returned
            pass

    def _queue(self, job: Job) -> Future[None]:
        future: Future[None] = Future()
        if self._closed:  # the job says what it makes of that
            _tell(future, _problem_of(job))
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._waiting += 1
        self._jobs.put((job, future))
        return future

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            problem = _problem_of(job)
            with self._lock:
                self._waiting -= 1
            _tell(future, problem)
            del entry, job, future, problem  # keep no tensor while waiting for the next


def _problem_of(job: Job) -> BaseException | None:
    try:
        job()
    except BaseException as error:  # whatever it is, the one who waits must have it
        return error
    return None


def _tell(future: Future[None], problem: BaseException | None) -> None:
    if problem is None:
        future.set_result(None)
    else:
        future.set_exception(problem)
