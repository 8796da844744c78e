"""Calls in the order they were made, whether the caller waits or not.

A call that the caller waits for runs in the caller's own thread if nothing is before it: handing it
over would cost more than a small all-reduce. The rest runs in one thread, which starts with the
first asynchronous call and ends with `close`. That thread also runs the callbacks of futures, and a
callback may call a collective: it runs there and then, after all that was queued before it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

Job = Callable[[], None]


class Worker:
    """Runs jobs one after the other.

    Args:
        name: Of its thread.
        interrupt: Called where a signal's handler raises while `call` waits for what is queued.
    """

    def __init__(self, name: str, interrupt: Callable[[], None] | None = None) -> None:
        self._name, self._interrupt = name, interrupt
        # A signal's handler may close what it interrupts, and close waits for the thread: so the
        # lock is reentrant, and the thread takes it only where it can see that it is closed.
        self._lock = threading.RLock()
        self._inside = self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Job, Future[None]] | None] = queue.SimpleQueue()
        self._queued = 0  # jobs; written by who holds the lock
        self._ended = 0  # of them; written by the thread alone, or after its end
        self._thread: threading.Thread | None = None
        self._serving: int | None = None  # the thread's own number while it runs

    def call(self, job: Job) -> None:
        """Run a job after those before it, and return when it is done.

        Raises:
            RuntimeError: A signal's handler called it in the middle of another call.
        """
        if self._serving == threading.get_ident():
            if (problem := self._run_within(job)) is not None:
                raise problem
            return
        with self._lock:
            if self._inside:
                raise RuntimeError("a signal's handler cannot call a collective within another")
            if self.is_idle:
                self._inside = True
                try:
                    job()
                finally:
                    self._inside = False
                return
            future = self._queue(job, Future())
        try:
            future.result()
        except BaseException:
            if self._interrupt is not None and not future.done():
                self._interrupt()
            raise

    def submit(self, job: Job, future: Future[None] | None = None) -> Future[None]:
        """Run a job after those before it, and return at once.

        In a callback, which runs in the worker's own thread, it returns when the job is done.

        Args:
            job: What is run.
            future: That hears how it ended; None: a new one.

        Returns:
            The future.
        """
        future = Future() if future is None else future
        if self._serving == threading.get_ident():
            _tell(future, self._run_within(job))
            return future
        with self._lock:
            return self._queue(job, future)

    @property
    def is_idle(self) -> bool:
        """Whether all jobs have been run; the callbacks of their futures may be under way."""
        return self._queued == self._ended

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

    def _queue(self, job: Job, future: Future[None]) -> Future[None]:
        if self._closed:  # the job says what it makes of that
            _tell(future, _problem_of(job))
            return future
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._thread.start()
        self._queued += 1
        self._jobs.put((job, future))
        if self._closed:  # by a signal's handler since: nobody may be left who serves the job
            self._run_queued()
            self._jobs.put(None)
        return future

    def _serve(self) -> None:
        self._serving = threading.get_ident()
        while (entry := self._jobs.get()) is not None:
            self._run(*entry)
            del entry  # keep no tensor while waiting for the next
        self._serving = None  # another thread may get the number

    def _run(self, job: Job, future: Future[None]) -> None:
        problem = _problem_of(job)
        self._ended += 1
        _tell(future, problem)

    def _run_queued(self) -> None:
        closed = False
        with suppress(queue.Empty):
            while True:
                entry = self._jobs.get_nowait()
                if entry is None:
                    closed = True
                else:
                    self._run(*entry)
        if closed:
            self._jobs.put(None)  # who serves must see it still

    def _run_within(self, job: Job) -> BaseException | None:
        """Run a job in the thread itself, in the middle of a callback."""
        while not self._lock.acquire(timeout=0.05):
            if self._closed:  # perhaps by a handler within the call that has the lock
                return _problem_of(job)
        self._queued += 1  # from here on nobody runs a call in a thread of his own
        self._lock.release()
        self._run_queued()
        problem = _problem_of(job)
        self._ended += 1
        return problem


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
