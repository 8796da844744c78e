"""Asking whether to suspend, and leaving.

A call is one straight line: `receive_suspend_command` → `Listener` (what did this process hear?) →
`Agreement` (do all ranks stop at this boundary?). Handlers are set by the first call, and nothing
by importing.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from hfai.client.agreement import Agreement
from hfai.client.listener import Listener
from hfai.client.workers import REQUESTS, ForkHooks

# EX_TEMPFAIL of sysexits.h, "the user is invited to retry". No signal and no Python error ends a
# process with it.
EXIT_SUSPENDED = 75
FILE_VARIABLE = "HFAI_SUSPEND_FILE"
# Seconds that a rank which is done waits for the others before it ends. All have saved by then, in
# general; a script in which rank 0 alone leaves should not take a cluster's whole grace for it.
LEAVE_PATIENCE = 10.0

_log = logging.getLogger("hfai.client")


class _State:
    """What this process knows; a forked child begins with nothing."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.listener: Listener | None = None
        self.agreement: Agreement | None = None
        # The process group whose ranks agree; weak, since a group ends when it is forgotten.
        self.group: weakref.ref[Any] | None = None
        # The parent's, whose store is the parent's connection.
        self.inherited_group: weakref.ref[Any] | None = None
        self.told = False  # receive_suspend_command() has returned True
        self.is_worker = False
        self.hears_signals = False
        self.hooks: ForkHooks | None = None


_state = _State()


def receive_suspend_command(timeout: float = 500, raise_exception: bool = False) -> bool:
    """Say whether to suspend at this step boundary: save and call `go_suspend`.

    A request is SIGTERM, SIGUSR1, or a file with the name that the environment variable
    HFAI_SUSPEND_FILE gives. One rank that hears it is enough. Where torch.distributed has several
    ranks, all call this at the same step boundaries; all get True at the same one, and from then
    on. No call waits for another rank for longer than a step takes or a second, and that only once.
    Ranks that never call it are left out.

    In a loader's worker process it is always False.

    Args:
        timeout: Seconds from a request until all ranks have come to a boundary.
        raise_exception: Changes nothing; existing scripts pass it.

    Raises:
        TimeoutError: Some rank has not; it is named. It would be no good to suspend without it.
        TypeError: `timeout` is no number.
        ValueError: `timeout` is not positive.
    """
    if not isinstance(timeout, (int, float)) or isinstance(timeout, bool):
        raise TypeError(f"timeout is {timeout!r}: give a number of seconds")
    if not timeout > 0:
        raise ValueError(f"timeout is {timeout}: give a positive number of seconds")
    with _state.lock:
        if _state.is_worker:
            return False
        if _state.listener is None or (not _state.hears_signals and _is_main_thread()):
            listen()
        assert _state.listener is not None
        heard = _state.listener.listen()
        agreement = _agreement()
        if agreement is None:
            _state.told = _state.told or heard is not None
        else:
            _state.told = agreement.at_boundary(heard, timeout)
        return _state.told


def heard() -> str | None:
    """Return what this process itself has heard, in words, or None; other ranks are not asked.

    For scripts whose ranks agree in a way of their own. `listen` comes first.
    """
    with _state.lock:
        return None if _state.listener is None else _state.listener.listen()


def go_suspend(timeout: float = 500, raise_exception: bool = False) -> None:
    """End this process with the exit code 75, which means: start me again.

    It does nothing unless `receive_suspend_command` has returned True or, where this process is no
    rank of several that agree, it has heard a request. It removes the control file and waits for
    the other ranks to come here too, 10 s at most. In the main thread
    it raises SystemExit, so that the script's own clean-up runs; in another thread, where that
    would end the thread only, it flushes the standard streams and ends the process at once.

    Args:
        timeout: Seconds that it may wait for the other ranks, if that is less than 10.
        raise_exception: Changes nothing; existing scripts pass it.

    Raises:
        SystemExit: With the code 75.
    """
    with _state.lock:
        listener, agreement = _state.listener, _state.agreement
        if not _state.told and (agreement is not None or heard() is None):
            _log.info("go_suspend(): there is no request to suspend, the process goes on")
            return
    reason = heard() or "a request"
    if listener is not None:
        listener.take_file_away()
    if agreement is not None and agreement.stop_at is not None:
        reason = agreement.reason
        agreement.leave(min(timeout, LEAVE_PATIENCE))
    if agreement is None or agreement.rank == 0:
        _log.warning(
            "suspended (%s): exit code %d, which means start me again", reason, EXIT_SUSPENDED
        )
    if _is_main_thread():
        if listener is not None:
            atexit.register(listener.ignore)
        raise SystemExit(EXIT_SUSPENDED)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(EXIT_SUSPENDED)


def listen(
    signals: Iterable[signal.Signals] = REQUESTS, file: str | os.PathLike[str] | None = None
) -> None:
    """Listen for requests from now on; the first `receive_suspend_command` does so by itself.

    Call it before anything that takes long (the first step, making loader workers), so that a
    request which comes then is heard. Handlers that are there are called after ours. A signal that
    was ignored is heard. Listening already, it changes what is listened for; in a thread other than
    the main one, only the file.

    Args:
        signals: Signals that are requests; none: only the file is.
        file: The control file; None: what HFAI_SUSPEND_FILE says, if it is set.

    Raises:
        TypeError: `signals` is one signal alone.
        ValueError: One of them is no signal that a process can handle.
    """
    if file is None:
        file = os.environ.get(FILE_VARIABLE) or None
    with _state.lock:
        if _state.is_worker:
            return
        listener, old = Listener(signals, Path(file) if file is not None else None), _state.listener
        if _state.hooks is None:
            _state.hooks = ForkHooks(_in_child)
        if not _is_main_thread():
            if old is not None:  # what the main thread listens for stays
                old.file = listener.file or old.file
                return
            _log.warning(
                "signals are not heard yet: the first call came from the thread %r, and Python "
                "lets only the main thread handle signals; call hfai.client.listen() there",
                threading.current_thread().name,
            )
        else:
            listener.start()  # before the old one stops: no signal falls in between
            _state.hears_signals = True
        if old is not None:
            listener.heard = listener.heard or old.heard
            old.stop()
        _state.listener = listener


def stop_listening() -> None:
    """Put the handlers back that were there, and forget what was heard.

    A handler that the script has set since stays. The next `receive_suspend_command` listens
    again.
    """
    with _state.lock:
        if _state.listener is not None:
            _state.listener.stop()
            _state.listener, _state.hears_signals = None, False
        if _state.agreement is None:
            _state.told = False


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _agreement() -> Agreement | None:
    """Return this rank's part in the default process group; None where it is alone."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    group = distributed.group.WORLD
    if any(known is not None and known() is group for known in _known_groups()):
        return _state.agreement
    _state.group, _state.agreement = weakref.ref(group), None
    if distributed.get_world_size() > 1:
        store = _store(group)
        if store is None:
            _log.warning("the process group has no store: each rank suspends by itself")
        else:
            _state.agreement = Agreement(
                store, distributed.get_rank(), distributed.get_world_size()
            )
    return _state.agreement


def _known_groups() -> tuple[weakref.ref[Any] | None, ...]:
    return _state.group, _state.inherited_group


def _store(group: Any) -> Any:
    """Return the store that the ranks of the default group met at, or None."""
    world = getattr(sys.modules["torch.distributed.distributed_c10d"], "_world", None)
    found = world.pg_map.get(group) if world is not None else None
    return found[1] if found else None


def _in_child(is_worker: bool) -> None:
    """Be deaf in a forked child, until it calls for itself; a worker stays so."""
    global _state
    if is_worker:
        _state.is_worker = True
        return
    before, _state = _state, _State()  # a lock may have been held by another thread
    _state.hooks = before.hooks
    _state.inherited_group = before.group or before.inherited_group
    _state.is_worker = before.is_worker
    if before.listener is not None:
        before.listener.leave_to_child()
