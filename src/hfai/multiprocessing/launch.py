"""torch.multiprocessing.spawn with each process near its GPU.

Processes are started anew, not forked: neither CUDA nor hfreduce's shared memory survives a fork.
A request to suspend goes through to them, and so does their answer.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException

from hfai.client import EXIT_SUSPENDED
from hfai.multiprocessing import numa
from hfai.multiprocessing.forward import Forwarding


def spawn(
    fn: Callable[..., object],
    args: tuple[Any, ...] = (),
    nprocs: int | None = None,
    bind_numa: bool = True,
    join: bool = True,
    daemon: bool = False,
) -> Any:
    """Run `fn(local_rank, *args)` in processes of their own.

    Args:
        fn: A function of a module, so that the processes can import it.
        args: What it takes after the local rank.
        nprocs: The number of processes; None: the number of GPUs.
        bind_numa: Run each process on the processors near its GPU. A machine with one NUMA node has
            nothing to choose.
        join: Wait for all; the first that fails ends the others. SIGTERM and SIGUSR1 are passed
            on to them meanwhile.
        daemon: Processes end with this one.

    Returns:
        None, or torch's context of the processes where `join` is false.

    Raises:
        ValueError: The number of processes makes no sense.
        RuntimeError: torchrun started this process, and others on this machine.
        torch.multiprocessing.ProcessRaisedException: A process raised; with its traceback.
        torch.multiprocessing.ProcessExitedException: A process was killed, or left.
        SystemExit: With the code 75: a process has left through `hfai.client.go_suspend`.
    """
    if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > 1 and "LOCAL_RANK" in os.environ:
        raise RuntimeError(
            "torchrun has started a process for each GPU already (LOCAL_RANK is set): call the "
            "function itself, or start the script with python in place of torchrun"
        )
    if nprocs is None:
        nprocs = torch.cuda.device_count()
        if nprocs == 0:
            raise ValueError("there is no GPU to count: give nprocs, the number of processes")
    if nprocs < 1:
        raise ValueError(f"nprocs={nprocs}: at least one process is needed")
    start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
    bound = numa.here(nprocs) if bind_numa else None
    begin = _Start(fn, nprocs, bound)
    if not join:
        return start(begin, args, nprocs=nprocs, join=False, daemon=daemon)
    with Forwarding() as forwarding:
        context = start(begin, args, nprocs=nprocs, join=False, daemon=daemon)
        forwarding.to(context.pids())
        try:
            while not context.join():
                pass
        except ProcessExitedException as error:
            if error.exit_code != EXIT_SUSPENDED:
                raise
            raise SystemExit(EXIT_SUSPENDED) from None
    return None


class _Start:
    """What each process runs: it takes its place on the machine, then calls the function."""

    def __init__(
        self, fn: Callable[..., object], nprocs: int, bound: list[set[int]] | None
    ) -> None:
        self._fn, self._nprocs, self._bound = fn, nprocs, bound

    def __call__(self, local_rank: int, *args: Any) -> None:
        # `place` reads it. torchrun with one process a machine has counted machines with RANK and
        # WORLD_SIZE; its LOCAL_RANK and LOCAL_WORLD_SIZE would say that they count processes.
        os.environ["HFAI_NPROCS"] = str(self._nprocs)
        for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name, None)
        if self._bound is not None:
            os.sched_setaffinity(0, self._bound[local_rank])
        self._fn(local_rank, *args)
