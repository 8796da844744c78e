"""Real processes for tests: a function is run once a rank, and its results or errors come back.

Processes are forked from a server that has imported torch, which takes a tenth of starting anew;
the server has no thread and no group.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed as dist

import hfreduce

_CONTEXT = multiprocessing.get_context("forkserver")
# torch imports its compiler when a model is first wrapped, which takes a second each time.
_CONTEXT.set_forkserver_preload(["hfreduce", "haiscale.ddp", "torch._dynamo", "numpy"])


@dataclass
class Ended:
    """How a rank ended.

    Attributes:
        value: What the function returned.
        error: The type of what it raised, "Died" where it never said, or "".
        text: The traceback; of who died, how, and what it wrote to stderr.
        seconds: How long the function ran.
        code: The process's exit code; negative: the signal that killed it.
    """

    value: Any = None
    error: str = ""
    text: str = ""
    seconds: float = 0.0
    code: int | None = None


class Ranks:
    """Processes that run `function(rank, world, store, *arguments)`."""

    def __init__(self, function: Callable[..., Any], world: int, *arguments: Any) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-")
        store = f"{self._directory.name}/store"
        self._pipes: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(world):
            mine, theirs = _CONTEXT.Pipe(duplex=False)
            process = _CONTEXT.Process(
                target=_run, args=(theirs, function, rank, world, store, arguments)
            )
            process.start()
            theirs.close()
            self._pipes.append(mine)
            self.processes.append(process)

    def pid(self, rank: int) -> int:
        """Return a rank's process number."""
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self, rank: int) -> None:
        """Kill a rank, as `kill -9` does."""
        self.processes[rank].kill()

    def _said(self, rank: int) -> str:
        """Return what a rank wrote to stderr, the stacks of its threads at a crash among it."""
        written = Path(f"{self._directory.name}/store.{rank}.stderr")
        return written.read_text(errors="replace")[-6000:] if written.exists() else ""

    def join(self, timeout: float = 60.0) -> list[Ended]:
        """Return how each rank ended; whoever has not by then is killed and fails the test."""
        deadline, ended = time.monotonic() + timeout, []
        for pipe in self._pipes:
            found = Ended(error="Hung", text="it did not end in time")
            try:
                if pipe.poll(max(0.0, deadline - time.monotonic())):
                    found = pipe.recv()
            except EOFError:
                found = Ended(error="Died")
            ended.append(found)
        for process, found in zip(self.processes, ended, strict=True):
            process.join(max(0.5, deadline - time.monotonic()))
            if process.exitcode is None:
                found.error, found.text = "Hung", found.text + "\nthe process did not end"
                os.kill(process.pid, signal.SIGABRT)  # writes the stacks of its threads
                process.join(5)
                process.kill()
                process.join()
            found.code = process.exitcode
        for rank, found in enumerate(ended):
            if found.error in ("Died", "Hung"):
                found.text += f"{_ending(found.code)}\n{self._said(rank)}"
        for pipe in self._pipes:
            pipe.close()
        self._directory.cleanup()
        return ended


def run(function: Callable[..., Any], world: int, *arguments: Any, timeout: float = 60.0) -> Any:
    """Run a function on all ranks and return what each returned; an error fails the test."""
    ended = Ranks(function, world, *arguments).join(timeout)
    for rank, end in enumerate(ended):
        assert not end.error, f"rank {rank}: {end.error}\n{end.text}"
        assert end.code == 0, f"rank {rank} ended with {end.code}"
    return [end.value for end in ended]


def reducer(rank: int, world: int, store: str, **options: Any) -> hfreduce.Reducer:
    """Return a rank's reducer, with a short timeout."""
    options = {"timeout": 30.0, **options}
    return hfreduce.Reducer(dist.FileStore(store, world), rank, world, **options)


def _run(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world: int,
    store: str,
    arguments: tuple[Any, ...],
) -> None:
    with open(f"{store}.{rank}.stderr", "w") as said:
        os.dup2(said.fileno(), 2)
    faulthandler.enable(2)
    torch.set_num_threads(1)
    start = time.monotonic()
    try:
        ended = Ended(function(rank, world, store, *arguments))
    except BaseException as error:
        ended = Ended(None, type(error).__name__, traceback.format_exc())
    ended.seconds = time.monotonic() - start
    with suppress(BrokenPipeError):
        pipe.send(ended)
    pipe.close()


def _ending(code: int | None) -> str:
    if code is None or code >= 0:
        return f"it exited with {code} before it had a result"
    return f"killed by signal {-code} ({signal.strsignal(-code)})"


def leftovers() -> list[str]:
    """Return what is left of groups that have ended: names, and who maps their memory."""
    found = [name for name in os.listdir("/dev/shm") if "hfreduce" in name]
    server = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    for pid in Path(f"/proc/{server}/task/{server}/children").read_text().split():
        with suppress(OSError):
            if "memfd:hfreduce" in Path(f"/proc/{pid}/maps").read_text():
                found.append(f"mapped by process {pid}")
    return found


def drop_group() -> None:
    """End the default group a moment after its last collective.

    torch 2.13 may hang where a gloo group is dropped within milliseconds of that: its thread needs
    the GIL, with which torch waits for it.
    """
    time.sleep(0.1)
    dist.destroy_process_group()


def leave() -> None:
    """End the default group once all ranks are through."""
    dist.barrier()
    drop_group()
