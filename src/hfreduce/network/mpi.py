"""Between nodes by MPI, where the ranks were started by it (mpiexec, srun) and mpi4py is there.

What MPI runs over is MPI's business: shared memory, TCP, InfiniBand. Sums are made here, as over
gloo, with the same bits: MPI's own reductions know no bfloat16 and fix no order.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from hfreduce.errors import DeadPeerError, LatePeerError
from hfreduce.exchange import when_there
from hfreduce.network.base import Place
from hfreduce.network.point_to_point import PointToPoint

# Requests of calls that failed, with what they refer to: MPI is not done with it.
_kept: list[Any] = []
_PAUSES = 0.00001, 0.001  # seconds between two looks, at first and at last


class MpiNetwork(PointToPoint):
    """Nodes connected by MPI."""

    name = "mpi"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise ImportError(
                f"network='mpi' needs mpi4py and an MPI library ({error}): pip install mpi4py, and "
                f"an MPI such as mpich, or use network='tcp'"
            ) from error
        self._mpi: Any = MPI
        world = MPI.COMM_WORLD
        # Messages of two lanes come from threads of their own.
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise RuntimeError(
                "MPI was initialised without MPI_THREAD_MULTIPLE: import mpi4py.MPI before "
                "anything else initialises MPI"
            )
        place.store.set(f"mpi/{place.rank}", str(world.Get_rank()))
        deadline = time.monotonic() + place.timeout
        try:
            ranks = [
                int(when_there(place.store, f"mpi/{node}", deadline, place.labels[node]))
                for node in range(place.size)
            ]
        except TimeoutError as error:
            raise ConnectionError(f"{place.labels[place.rank]} by MPI: {error}") from error
        if len(set(ranks)) < place.size:
            raise RuntimeError(
                "the ranks are not of one MPI world: start them with mpiexec or srun, or use "
                "network='tcp'"
            )
        self._comm = world.Create_group(world.Get_group().Incl(ranks))
        self._comm.Set_errhandler(MPI.ERRORS_RETURN)
        self._closed = False

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        lane: int,
    ) -> None:
        """See `PointToPoint`."""
        comm = self._comm
        received: list[tuple[int, Any]] = []
        sent: list[tuple[int, Any]] = []
        try:
            for node, tensor in receives:
                if tensor.numel():
                    received.append((node, comm.Irecv(self._bytes(tensor), node, lane)))
            for node, tensor in sends:
                if tensor.numel():
                    sent.append((node, comm.Isend(self._bytes(tensor), node, lane)))
            self._finish(received + sent)
        except BaseException as error:
            self._drop(received, sent)
            if isinstance(error, self._mpi.Exception):
                raise DeadPeerError(f"MPI lost a node ({error}): look for its own error") from error
            raise

    def close(self) -> None:
        """See `Network`. MPI's own end frees what it has."""
        self._closed = True

    def _finish(self, started: list[tuple[int, Any]]) -> None:
        deadline = time.monotonic() + self.place.timeout
        pause, longest = _PAUSES
        while started := [(node, request) for node, request in started if not request.Test()]:
            if self._closed:
                raise DeadPeerError("the network was closed in the middle of a call")
            if time.monotonic() > deadline:
                node = started[0][0]
                raise LatePeerError(
                    f"{self.place.labels[node]} did not send or receive within "
                    f"{self.place.timeout:g} s: it is dead, hangs, or has more to do than the "
                    f"timeout allows",
                    self.place.ranks[node],
                )
            time.sleep(pause)
            pause = min(2 * pause, longest)

    def _drop(self, received: list[tuple[int, Any]], sent: list[tuple[int, Any]]) -> None:
        """Have nothing written any more to what a call that failed was to receive."""
        for _, request in received:
            with suppress(self._mpi.Exception):
                if not request.Test():
                    request.Cancel()
        # MPI may read and write until these end, which for sends nothing can hasten.
        _kept.extend(request for _, request in received + sent)

    def _bytes(self, tensor: Tensor) -> list[Any]:
        return [tensor.view(torch.uint8).numpy(), self._mpi.BYTE]
