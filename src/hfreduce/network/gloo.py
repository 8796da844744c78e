"""Between nodes by gloo's TCP, which every torch has.

GLOO_SOCKET_IFNAME chooses the interface, as for gloo itself.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from torch import Tensor
from torch._C import _distributed_c10d

from hfreduce.errors import DeadPeerError, LatePeerError
from hfreduce.network.base import Place
from hfreduce.network.point_to_point import PointToPoint

_torch: Any = _distributed_c10d


class GlooNetwork(PointToPoint):
    """Nodes connected by gloo."""

    name = "gloo"

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        timeout = timedelta(seconds=place.timeout)
        try:
            self._group: Any = _torch.ProcessGroupGloo(
                place.store, place.rank, place.size, timeout=timeout
            )
        except RuntimeError as error:
            raise ConnectionError(
                f"{place.labels[place.rank]} cannot connect to the other nodes by gloo: "
                f"{_first_line(error)}; GLOO_SOCKET_IFNAME names the interface to use"
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
        started = []
        for node, tensor in receives:
            if tensor.numel():
                started.append((node, self._start(node, group.recv, [tensor], node, lane)))
        for node, tensor in sends:
            if tensor.numel():
                started.append((node, self._start(node, group.send, [tensor], node, lane)))
        for node, work in started:
            left = max(0.001, deadline - time.monotonic())
            self._start(node, work.wait, timedelta(seconds=left))

    def close(self) -> None:
        """See `Network`."""
        group, self._group = self._group, None
        # Old versions of torch hang up when nobody refers to the group.
        if (abort := getattr(group, "abort", None)) is not None:
            abort()

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
                f"the connection to {who} is lost ({_first_line(error)}): look for its own error",
                rank,
            ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
