"""Between nodes by gloo's TCP, which every torch has.

GLOO_SOCKET_IFNAME chooses the interface, as for gloo itself.

A wait of gloo's hears no signal, and goes on when the connection is closed here. So it has a thread
for each lane, and the call waits for that thread, which it can leave. What ends gloo's waits is
that one of them times out: it breaks all connections of the group. So `close` has one time out.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from hfreduce.errors import DeadPeerError, LatePeerError, PeerError, first_line
from hfreduce.network.base import Place
from hfreduce.network.point_to_point import PointToPoint

_torch: Any = _distributed_c10d
_NEVER = 3  # a lane in which nobody sends


class GlooNetwork(PointToPoint):
    """Nodes connected by gloo."""

    name = "gloo"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        self._waiters: dict[int, _Waiter] = {}  # by lane
        self._lock = threading.RLock()  # two lanes may begin at once
        timeout = timedelta(seconds=place.timeout)
        try:
            self._group: Any = _torch.ProcessGroupGloo(
                place.store, place.rank, place.size, timeout=timeout
            )
        except RuntimeError as error:
            raise ConnectionError(
                f"{place.labels[place.rank]} cannot connect to the other nodes by gloo: "
                f"{first_line(error)}; GLOO_SOCKET_IFNAME names the interface to use"
            ) from error

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        lane: int,
    ) -> None:
        """See `PointToPoint`."""
        group = self._group
        if group is None:
            raise RuntimeError("the network is closed")
        deadline = time.monotonic() + self.place.timeout
        started: list[tuple[int, Any]] = []
        for node, tensor in receives:
            if tensor.numel():
                started.append((node, self._start(node, group.recv, [tensor], node, lane)))
        for node, tensor in sends:
            if tensor.numel():
                started.append((node, self._start(node, group.send, [tensor], node, lane)))
        kept = *sends, *receives

        def finish() -> None:
            assert kept  # the memory stays while gloo waits, whoever has left
            for node, work in started:
                left = max(0.001, deadline - time.monotonic())
                self._start(node, work.wait, timedelta(seconds=left))

        if not started:
            return
        with self._lock:
            if self._group is None:
                raise RuntimeError("the network was closed in the middle of a call")
            if lane not in self._waiters:
                self._waiters[lane] = _Waiter(f"hfreduce-gloo-{lane}")
            ended = self._waiters[lane].submit(finish)
        try:
            ended.result()
        except PeerError:
            if self._group is None:
                raise RuntimeError("the network was closed in the middle of a call") from None
            raise

    def close(self) -> None:
        """See `Network`."""
        with self._lock:
            group, self._group = self._group, None
            waiters, self._waiters = self._waiters, {}
        if group is not None and any(waiter.is_busy for waiter in waiters.values()):
            self._end_waits(group)
        # Old versions of torch hang up when nobody refers to the group.
        if (abort := getattr(group, "abort", None)) is not None:
            abort()
        for waiter in waiters.values():
            waiter.close()

    def _end_waits(self, group: Any) -> None:
        for node in range(self.place.size):
            if node == self.place.rank:
                continue
            try:
                nothing = group.recv([torch.empty(1)], node, _NEVER)
                nothing.wait(timedelta(milliseconds=1))
            except RuntimeError as error:
                if "Timed out" in str(error):
                    return  # the connection was whole, and now none is

    def _start(self, node: int, call: Any, *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except RuntimeError as error:
            who, rank = self.place.labels[node], self.place.ranks[node]
            if "Timed out" in str(error) or "timeout" in str(error):
                raise LatePeerError(
                    f"{who} did not send or receive within {self.place.timeout:g} s: it hangs, or "
                    f"has more to do than the timeout allows",
                    rank,
                ) from error
            raise DeadPeerError(
                f"the connection to {who} is lost ({first_line(error)}): look for its own error",
                rank,
            ) from error


class _Waiter:
    """A thread that waits for gloo."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None]
        self._jobs = queue.SimpleQueue()
        self._last: Future[None] | None = None
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> Future[None]:
        """Run a job after those before it."""
        self._last = future = Future[None]()
        self._jobs.put((job, future))
        return future

    def close(self) -> None:
        """Let the thread end, when its wait has."""
        self._jobs.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def is_busy(self) -> bool:
        """Whether it waits."""
        return self._last is not None and not self._last.done()

    def _serve(self) -> None:
        while (entry := self._jobs.get()) is not None:
            job, future = entry
            try:
                job()
            except BaseException as error:  # whoever waits must have it
                future.set_exception(error)
            else:
                future.set_result(None)
            del entry, job, future  # keep no tensor while waiting for the next
