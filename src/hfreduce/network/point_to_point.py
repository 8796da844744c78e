"""All-reduce for engines that send and receive.

A tensor is cut into as many slices as there are nodes. Each node gets everyone's part of its slice,
adds them in the order of the nodes, in float32 and rounded once, and gives the sum to all: each
sends and receives 2 (N - 1) / N of the tensor, as little as a ring does, in 2 rounds in place of
its 2 (N - 1). Narrow types come as float32 sums and are rounded once, before the second round; a
ring or a tree rounds at each hop. Small tensors go whole to everyone: one round.

What a ring or a tree has over this is that a node talks to few others. Up to 8 nodes neither is
faster where packets take time; benchmarks/allreduce_algorithms.py measures them.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from hfreduce.network.base import Network, Place
from hfreduce.network.sums import combine, finish

# Up to here a round costs more than to send the whole to everyone. In bytes that a node sends.
WHOLE_BYTES = 64 << 10
_LINE = 64  # elements: slices start at whole cache lines
SAID = Network.lanes  # the lane of what is said before a call; tensors go in those below


class PointToPoint(Network):
    """A network whose engine sends and receives."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self._scratch: dict[int, Tensor] = {}  # by lane

    @abstractmethod
    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Tensor]],
        lane: int,
    ) -> None:
        """Send to nodes and receive from nodes, all at once, and wait for the end of all.

        Args:
            sends: A node and what it gets; contiguous and of one dimension.
            receives: A node and where that goes which it sends, which may be less.
            lane: What is sent in one is received in the same.

        Raises:
            DeadPeerError: A node is gone.
            LatePeerError: A node did not come within the timeout.
        """

    def tell(self, frame: Tensor, room: int) -> list[Tensor]:
        """See `Network`."""
        frames = self._parts(torch.empty(0, dtype=torch.uint8), room, SAID)
        others = self._others()
        self.exchange(
            [(node, frame) for node in others], [(node, frames[node]) for node in others], SAID
        )
        frames[self.place.rank] = frame
        return frames

    def all_reduce(
        self, tensor: Tensor, op: str, lane: int = 0, *, out: Tensor, divisor: int = 1
    ) -> None:
        """See `Network`."""
        if not tensor.numel():
            return
        if tensor.nbytes * (self.place.size - 1) <= WHOLE_BYTES:
            self._whole(tensor, op, lane)
            finish(tensor, out, divisor)
        else:
            self._by_slices(tensor, op, lane, out, divisor)

    def _whole(self, tensor: Tensor, op: str, lane: int) -> None:
        others = self._others()
        parts = self._parts(tensor, tensor.numel(), lane)
        self.exchange(
            [(node, tensor) for node in others], [(node, parts[node]) for node in others], lane
        )
        combine(parts, tensor, op)

    def _by_slices(self, tensor: Tensor, op: str, lane: int, out: Tensor, divisor: int) -> None:
        slices, results = cut(tensor, self.place.size), cut(out, self.place.size)
        mine = slices[self.place.rank]
        others = self._others()
        parts = self._parts(mine, mine.numel(), lane)
        self.exchange(
            [(node, slices[node]) for node in others],
            [(node, parts[node]) for node in others],
            lane,
        )
        combine(parts, mine, op)
        result = results[self.place.rank]
        finish(mine, result, divisor)
        self.exchange(
            [(node, result) for node in others], [(node, results[node]) for node in others], lane
        )

    def _others(self) -> list[int]:
        """Return the other nodes, the next one first: not all send to one at once."""
        rank, size = self.place.rank, self.place.size
        return [(rank + step) % size for step in range(1, size)]

    def _parts(self, own: Tensor, count: int, lane: int) -> list[Tensor]:
        """Return room for each node's part; this node's is where it lies."""
        nbytes = (count * own.element_size() + _LINE - 1) // _LINE * _LINE
        scratch = self._scratch.get(lane)
        if scratch is None or scratch.numel() < nbytes * self.place.size:
            scratch = torch.empty(nbytes * self.place.size, dtype=torch.uint8)
            self._scratch[lane] = scratch
        parts = [
            scratch[node * nbytes :][: count * own.element_size()].view(own.dtype)
            for node in range(self.place.size)
        ]
        parts[self.place.rank] = own
        return parts


def cut(tensor: Tensor, count: int) -> list[Tensor]:
    """Return `count` slices of a tensor of one dimension; the last ones may be short or empty."""
    each = -(-tensor.numel() // count)
    each = -(-each // _LINE) * _LINE
    return [tensor[min(i * each, tensor.numel()) :][:each] for i in range(count)]
