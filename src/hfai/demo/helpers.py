"""The other processes of `hfai demo --nprocs`: started, watched, and never left behind.

Rank 0 meets them through a TCPStore of its own on the loopback interface, so there is no file that
a killed run could leave. While it meets them it looks whether they live. The kernel kills a helper
when rank 0 dies, however that does (PR_SET_PDEATHSIG). Signals to the whole process group, such as
Ctrl-C, are blocked in a helper until it has said how it takes them: it ignores them, as rank 0
decides.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from multiprocessing import resource_tracker
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

import hfreduce
from hfai.client import ignore_in_worker
from hfai.demo.batches import Batches
from hfai.demo.request import HelperError
from hfai.demo.team import Team, device_of
from hfai.multiprocessing import spawn

if TYPE_CHECKING:
    from hfai.demo.settings import Settings

# A helper imports torch first, which takes long where the disk is cold and the cores are busy.
MEETING_SECONDS = 120.0
LEAVING_SECONDS = 10.0
POLL_SECONDS = 0.05
# A broken connection is seen before the kernel has taken a dying process down.
DYING_SECONDS = 2.0
GROUP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
PR_SET_PDEATHSIG = 1  # of <sys/prctl.h>


class Helpers:
    """The other processes, while they train beside this one. Made in the main thread.

    Args:
        settings: Of the run.
        training: The record file of the windows.
        resume: The file of the run to go on with, or None.
        device: "cpu" or "cuda".
        size: The number of processes, this one among them.
    """

    def __init__(
        self, settings: Settings, training: Path, resume: Path | None, device: str, size: int
    ) -> None:
        self._size = size
        self._store = _store(0, is_master=True)
        arguments = (os.getpid(), self._store.port, size, settings, training, resume, device)
        with _blocked():
            self._others = spawn(_help, arguments, nprocs=size - 1, join=False, daemon=True)

    def __enter__(self) -> Team:
        """Meet them.

        Raises:
            HelperError: One died or did not come.
        """
        try:
            self._team = self._meet()
        except BaseException:
            self._end(0.0)
            raise
        return self._team

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End them.

        Raises:
            HelperError: The work ended with an error because one died.
        """
        fallen = ""
        if isinstance(error, Exception):
            deadline = time.monotonic() + DYING_SECONDS
            lost = isinstance(error, hfreduce.PeerError)
            while not (fallen := self._fallen()) and lost and time.monotonic() < deadline:
                time.sleep(POLL_SECONDS)
        if fallen:
            self._end(0.0)
            with suppress(RuntimeError):
                self._team.leave()
            raise HelperError(
                f"{fallen}: the training ended with it; start again, with --resume where a "
                f"resume/ was written"
            ) from error
        self._team.leave()
        self._end(LEAVING_SECONDS)

    def _meet(self) -> Team:
        """Make this process's part while looking whether the others live."""
        deadline = time.monotonic() + MEETING_SECONDS
        while self._store.add("ready", 0) < self._size - 1:
            self._look(deadline)
            time.sleep(POLL_SECONDS)
        met: list[Team | BaseException] = []

        def meet() -> None:
            try:
                met.append(Team(0, self._size, self._store))
            except BaseException as error:
                met.append(error)

        # These calls have timeouts of minutes, do not look at processes, and hold the store's lock.
        thread = threading.Thread(target=meet, daemon=True)
        thread.start()
        while thread.is_alive():
            self._look(deadline)
            thread.join(POLL_SECONDS)
        if isinstance(met[0], BaseException):
            raise met[0]
        return met[0]

    def _look(self, deadline: float) -> None:
        """Raise HelperError where one has died, or that time has come, before all have met."""
        fallen = self._fallen(at_start=True)
        if not fallen and time.monotonic() > deadline:
            fallen = f"not all of {self._size} processes came within {MEETING_SECONDS:.0f} s"
        if fallen:
            raise HelperError(f"{fallen}: the training did not begin; start again")

    def _fallen(self, at_start: bool = False) -> str:
        """Return which helper ended as it should not, and how, or "".

        Args:
            at_start: None should end at all.
        """
        for index, process in enumerate(self._others.processes):
            code = process.exitcode
            if code is None or (code == 0 and not at_start):
                continue
            who = f"rank {index + 1} of {self._size} (process {process.pid})"
            if code < 0:
                return f"{who} was killed by {signal.Signals(-code).name}"
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                # torch's spawn leaves a traceback here, as a pickled text.
                trace = pickle.loads(Path(self._others.error_files[index]).read_bytes())
                return f"{who} raised {str(trace).strip().splitlines()[-1]}"
            return f"{who} ended with the exit code {code}"
        return ""

    def _end(self, seconds: float) -> None:
        """Wait so long for each, then kill it."""
        for process, trace in zip(self._others.processes, self._others.error_files, strict=True):
            process.join(seconds)
            if process.is_alive():
                process.kill()
                process.join()
            Path(trace).unlink(missing_ok=True)


@contextmanager
def _blocked() -> Iterator[None]:
    """Processes started in here have the group's signals blocked."""
    # Starting it would unblock some; it is started only once.
    resource_tracker.ensure_running()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, GROUP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _store(port: int, is_master: bool = False) -> Any:
    timeout = timedelta(seconds=MEETING_SECONDS)
    store: Any = dist.TCPStore  # type: ignore[attr-defined]
    return store("127.0.0.1", port, None, is_master, timeout, wait_for_workers=False)


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when the one that started it has died."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before
        os._exit(1)


def _help(
    index: int,
    parent: int,
    port: int,
    size: int,
    settings: Settings,
    training: Path,
    resume: Path | None,
    kind: str,
) -> None:
    """Train as rank `index` + 1, and end quietly where rank 0 does."""
    _die_with(parent)
    # Ctrl-C reaches all, and so may what a cluster engine sends: rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_in_worker()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, GROUP_SIGNALS)

    from hfai.demo.state import RunState
    from hfai.demo.train import Course, DivergenceError, Trainer, train
    from hfai.nn import to_hfai

    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    store = _store(port)
    store.add("ready", 1)
    team = Team(index + 1, size, store)
    device = device_of(kind, team.rank)
    torch.manual_seed(settings.seed)
    trainer = Trainer(to_hfai(settings.make_model().to(device)), settings, device)
    batches = Batches(training, settings.batch_size, settings.seed, settings.task)
    losses: list[float] = []
    if resume is not None:
        saved = RunState.load(resume)
        trainer.optimizer.load_state_dict(saved.optimizer)
        batches.load_state_dict(saved.place)
        losses = saved.losses
    trainer.join(team)
    try:
        train(
            trainer,
            team.share(batches),
            Course(losses, batches.state_dict()),
            team.agree(None),
            None,
            lambda: None,
            float("inf"),
        )
    except (DivergenceError, hfreduce.PeerError):
        return  # rank 0 says so
    team.leave()
