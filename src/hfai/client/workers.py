"""Processes that this one makes are deaf: loader workers outlive a request and save nothing.

A forked process has its parent's handlers, and would note a request that nobody asks it about, or
not end when its parent ends it. A hook that runs in every forked child (`os.register_at_fork`) puts
back what was there before; signals that come while the child is made wait until then, because
Python forgets those that a new child gets. A worker of torch's DataLoader needs more, since a
signal to the whole job reaches it as well: it ignores requests from everyone but its parent (see
`native/worker_signals.cpp`).

torch sets handlers of its own at the start of a worker, after any hook of ours; what runs later in
a worker is its `worker_init_fn`. In a forked worker, and only there, that function is therefore
wrapped; until it runs, requests are blocked, and wait. A spawned worker starts anew and has nothing
of ours: it is given `ignore_in_worker`.
"""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import util
from types import FrameType
from typing import Any

REQUESTS = (signal.SIGTERM, signal.SIGUSR1)
_log = logging.getLogger("hfai.client")


def ignore_in_worker(worker_id: int = 0) -> None:
    """Ignore SIGTERM and SIGUSR1 in this worker process, SIGTERM of its own parent excepted.

    Forked workers of torch's DataLoader do so by themselves once the parent listens. Give it to a
    loader whose workers are spawned: `DataLoader(…, worker_init_fn=hfai.client.ignore_in_worker)`.
    Where the native part is missing, SIGTERM keeps torch's handler, which ends the worker.

    Args:
        worker_id: What torch gives to a `worker_init_fn`; not used.
    """
    try:
        from hfai.client._worker_signals import ignore_from_others
    except ImportError:
        signal.signal(signal.SIGUSR1, _ignore)
    else:
        ignore_from_others([int(number) for number in REQUESTS])


class ForkHooks:
    """Calls `in_child(is_worker)` in every process that is forked from this one.

    Args:
        in_child: Called first with False and, in a worker of torch's DataLoader, again with True.
    """

    def __init__(self, in_child: Callable[[bool], None]) -> None:
        self._in_child = in_child
        self._thread = threading.local()  # several threads may fork at once
        os.register_at_fork(
            before=self._before_fork,
            after_in_parent=self._restore_mask,
            after_in_child=self._after_fork,
        )
        # It runs later, when a child of multiprocessing knows what it is to do.
        util.register_after_fork(self, ForkHooks._in_process)

    def _before_fork(self) -> None:
        self._thread.mask = signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)

    def _restore_mask(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._thread.mask)

    def _after_fork(self) -> None:
        self._in_child(False)
        self._restore_mask()

    def _in_process(self) -> None:
        if _wrap_worker(multiprocessing.current_process()):
            self._in_child(True)


def _wrap_worker(process: Any) -> bool:
    """Make a new worker of torch's DataLoader call `ignore_in_worker`; say whether it is one."""
    torch_worker = sys.modules.get("torch.utils.data._utils.worker")
    loop = getattr(torch_worker, "_worker_loop", None)
    if loop is None or getattr(process, "_target", None) is not loop:
        return False
    try:
        call = inspect.signature(process._target).bind(*process._args, **process._kwargs)
        call.arguments["init_fn"] = _IgnoreThen(call.arguments["init_fn"])
        process._args, process._kwargs = call.args, call.kwargs
        signal.pthread_sigmask(signal.SIG_BLOCK, REQUESTS)
    except (AttributeError, KeyError, TypeError) as error:  # made otherwise, by another torch
        _log.warning(
            "this torch's loader workers are not known to hfai (%s): give the loader "
            "worker_init_fn=hfai.client.ignore_in_worker",
            error,
        )
    return True


class _IgnoreThen:
    """A `worker_init_fn` before the user's own."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        ignore_in_worker(worker_id)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, REQUESTS)
        if self._then is not None:
            self._then(worker_id)


def _ignore(number: int, frame: FrameType | None) -> None:
    """Do nothing."""
