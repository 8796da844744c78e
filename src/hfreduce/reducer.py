"""Collectives of the processes on one machine, through memory that they share.

    reducer = hfreduce.Reducer(store, rank, world_size)
    reducer.all_reduce(tensor)                              # in place
    handle = reducer.all_reduce(tensor, "avg", async_op=True)
    handle.wait()

Here is how a group comes to be, and how it ends; what can be called is in collectives.py.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING

import torch
from torch import distributed as dist

from hfreduce import arguments, exchange, outcome, segment, topology
from hfreduce.collectives import Collectives
from hfreduce.cuda import CHUNK_BYTES as GPU_CHUNK_BYTES
from hfreduce.cuda import MOST_THREADS as MOST_GPU_THREADS
from hfreduce.cuda import SLOTS as GPU_SLOTS
from hfreduce.cuda import CudaReducer
from hfreduce.worker import Worker

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from hfreduce._engine import Group

DEFAULT_TIMEOUT = 600.0


class Reducer(Collectives):
    """One rank's end of a group whose processes all run on one machine.

    Tensors are on the CPU, of any shape and strides; results are written into them. Sums and
    averages are made in float32 (float64 and integers: as they are) in the order of the ranks and
    rounded once, so every rank and every run gets the same bits.

    Args:
        store: That all ranks reach, to find each other.
        rank: This rank, from 0.
        world_size: The number of ranks.
        timeout: Seconds, or a timedelta, that a rank may be late for a step of a collective.
        name: Of the group, where several use one store.
        threads: That each rank works with; None: up to 4, where there are two processors for each.
        chunk_bytes: What is sent, added and fetched at a time; a multiple of 64.
        label: How messages call this rank; None: "rank" and its number.

    Raises:
        LatePeerError: A rank did not come within the timeout.
        UnavailableError: The ranks are not all on one machine, or the native engine was not built.
        ValueError: An argument makes no sense.
    """

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        *,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        name: str = "group",
        threads: int | None = None,
        chunk_bytes: int = segment.CHUNK_BYTES,
        label: str | None = None,
    ) -> None:
        seconds = arguments.seconds(timeout)
        arguments.check_rank(rank, world_size)
        meeting = exchange.through_store(store, rank, world_size, name, seconds)
        self._connect(meeting, rank, world_size, seconds, threads, chunk_bytes, label)

    @classmethod
    def from_group(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float | timedelta | None = None,
        threads: int | None = None,
        chunk_bytes: int = segment.CHUNK_BYTES,
    ) -> Reducer:
        """Return a reducer for the ranks of a process group, whatever its backend.

        Args:
            group: That meets to make the reducer; None: the default group.
            timeout: As for the class; None: the group's own.
            threads: As for the class.
            chunk_bytes: As for the class.
        """
        self = cls.__new__(cls)
        rank, world_size = dist.get_rank(group), dist.get_world_size(group)
        label = f"rank {rank} (global rank {dist.get_rank()})" if group is not None else None
        if timeout is None:
            timeout = exchange.timeout_of(group) or DEFAULT_TIMEOUT
        seconds = arguments.seconds(timeout)
        meeting = exchange.through_group(group, seconds)
        self._connect(meeting, rank, world_size, seconds, threads, chunk_bytes, label)
        return self

    def _connect(
        self,
        meeting: exchange.Exchange,
        rank: int,
        world_size: int,
        timeout: float,
        threads: int | None,
        chunk_bytes: int,
        label: str | None,
    ) -> None:
        self.rank, self.world_size, self.timeout = rank, world_size, timeout
        arguments.check_layout(world_size, threads, chunk_bytes)
        members = segment.meet(meeting, label or f"rank {rank}")
        self.labels = [f"{member.label} (pid {member.pid})" for member in members]
        if threads is None:
            threads = segment.default_threads(topology.processors(), world_size)
        group, settings, ended = segment.connect(
            meeting, rank, members, segment.Settings(chunk_bytes, threads), timeout
        )
        outcome.check(ended, group, self.labels, rank, "the group's first meeting", timeout)
        self.settings = settings
        self._group, self._process = group, os.getpid()
        self._worker = Worker(f"hfreduce-{rank}", group.interrupt)
        self._members = members
        self._gpus: dict[int, CudaReducer] = {}
        self._end = weakref.finalize(self, _end, group, self._worker, self._process, self._gpus)

    # ---- the group ----

    @property
    def nbytes(self) -> int:
        """Bytes of the memory that the ranks share, GPUs' left out."""
        return self._group.nbytes

    @property
    def gpus(self) -> Mapping[int, CudaReducer]:
        """The parts of this rank's GPUs that have been used, by index."""
        return self._gpus

    def set_timeout(self, timeout: float | timedelta) -> None:
        """Change how late a rank may be, for the calls that follow."""
        self.timeout = arguments.seconds(timeout)
        self._group.set_timeout(self.timeout)
        for gpu in self._gpus.values():
            gpu.set_timeout(self.timeout)

    def abandon(self) -> None:
        """Break the group because this rank lost its way to other nodes: all calls fail."""
        self._group.abandon()

    def close(self) -> None:
        """Leave the group: calls under way end with an error, and other ranks are told.

        It is not needed: when the process ends or the reducer is no longer used, this happens.
        """
        self._end()

    def __enter__(self) -> Reducer:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> str:
        raise TypeError("a Reducer belongs to its process: make one in each")

    def gpu(
        self,
        device: torch.device,
        *,
        chunk_bytes: int = GPU_CHUNK_BYTES,
        flags: bool = True,
        slots: int = GPU_SLOTS,
        threads: int | None = None,
    ) -> CudaReducer:
        """Return the group's part for a GPU of this rank; all ranks make it together, once.

        Args:
            device: With its index.
            chunk_bytes: What is copied at a time, at most; a multiple of 4096.
            flags: Let streams wait for words where the driver can, and not the host for events.
            slots: Chunks of this rank that may be under way at a time, from 4 on.
            threads: That add; None: up to 8, where there are two processors for each.

        Raises:
            UnavailableError: A rank could not pin the memory.
        """
        if device.index not in self._gpus:
            if threads is None:
                threads = segment.default_threads(
                    topology.processors(), self.world_size, MOST_GPU_THREADS
                )
            arguments.check_layout(self.world_size, threads, chunk_bytes, slots)
            self._gpus[device.index] = CudaReducer(
                exchange.through_collectives(self),
                self.rank,
                self._members,
                self.labels,
                device,
                self.timeout,
                threads,
                chunk_bytes,
                flags,
                slots,
            )
        return self._gpus[device.index]


def _end(group: Group, worker: Worker, process: int, gpus: dict[int, CudaReducer]) -> None:
    if os.getpid() == process:  # a forked child owns nothing here
        for gpu in gpus.values():
            gpu.close()
        group.stop()
        worker.close()
        group.close()
