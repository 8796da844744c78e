"""Large tensors over several nodes, in pieces that follow each other through the stages.

A piece is added within its node, each rank a slice; carried between the nodes; and handed out in
its node. While one is on the network the node adds the next and hands out the one before.
"""

from __future__ import annotations

from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hfreduce.agreement import Reduction
from hfreduce.handle import Handle
from hfreduce.network import Network
from hfreduce.network.point_to_point import cut
from hfreduce.reducer import Reducer
from hfreduce.worker import Worker


class Pieces:
    """The stages that pieces go through, in one rank.

    Args:
        local: The ranks of this node.
        columns: How many of them have a network; the first ones.
        network: This rank's, if it has one.
        piece_bytes: What is on the network at a time.
        name: Of the threads that carry.
    """

    def __init__(
        self, local: Reducer, columns: int, network: Network | None, piece_bytes: int, name: str
    ) -> None:
        self._local, self._columns, self._network = local, columns, network
        self._piece_bytes = piece_bytes
        lanes = Network.lanes if network is None else network.lanes
        self.carriers = [Worker(f"{name}-{lane}") for lane in range(lanes)]
        self._under_way: list[Future[None]] = []

    def all_reduce(self, data: Tensor, how: Reduction) -> None:
        """Reduce a tensor over all ranks of all nodes, in place.

        Args:
            data: Contiguous, of one dimension, with at least one element.
            how: What is done with it.
        """
        self._under_way.clear()
        parts = torch.split(data, self._piece_bytes // how.wide.itemsize)
        if len(parts) == 1:
            self._alone(parts[0], how)
        else:
            self._in_turn(parts, how)

    def wait(self, timeout: float) -> None:
        """Return when nothing of a call that failed writes to its tensor any more."""
        wait(self._under_way, timeout)

    def _alone(self, part: Tensor, how: Reduction) -> None:
        piece = self._piece(part, how.wide)
        if self._local.world_size > 1:
            self._local.reduce_scatter(piece.own, piece.slices, how.op)
        self._carry(piece, how)
        if self._local.world_size > 1:
            self._local.all_gather(piece.results, piece.result)

    def _in_turn(self, parts: tuple[Tensor, ...], how: Reduction) -> None:
        pieces: list[_Piece] = []
        scattered: list[Handle | None] = []
        carried: list[Future[None]] = []
        gathered: list[Handle | None] = []
        for at in range(len(parts) + 2):
            if at < len(parts):
                pieces.append(piece := self._piece(parts[at], how.wide))
                scattered.append(
                    self._follow(
                        self._local.reduce_scatter(piece.own, piece.slices, how.op, async_op=True)
                    )
                )
            if 1 <= at <= len(parts):
                _wait(scattered[at - 1])
                lane = (at - 1) % len(self.carriers)
                carry = partial(self._carry, pieces[at - 1], how, lane)
                carried.append(self.carriers[lane].submit(carry))
                self._under_way.append(carried[-1])
            if at >= 2:
                carried[at - 2].result()
                piece = pieces[at - 2]
                gathered.append(
                    self._follow(self._local.all_gather(piece.results, piece.result, async_op=True))
                )
                pieces[at - 2] = piece.without_sums()
        for handle in gathered:
            _wait(handle)

    def _piece(self, data: Tensor, wide: torch.dtype) -> _Piece:
        place = self._local.rank
        results = self._slices(data)
        slices = results if wide == data.dtype else self._slices(data.to(wide))
        return _Piece(slices, slices[place], results, results[place])

    def _slices(self, piece: Tensor) -> list[Tensor]:
        """Return each local rank's part of a piece: none for ranks without a network."""
        empty = [piece[:0]] * (self._local.world_size - self._columns)
        return cut(piece, self._columns) + empty

    def _carry(self, piece: _Piece, how: Reduction, lane: int = 0) -> None:
        if self._network is not None:
            self._network.all_reduce(piece.own, how.op, lane, out=piece.result, divisor=how.divisor)

    def _follow(self, handle: Handle | None) -> Handle | None:
        assert handle is not None
        self._under_way.append(handle.future)
        return handle


@dataclass(frozen=True)
class _Piece:
    """A part of a tensor on its way.

    Attributes:
        slices: What each rank of the node adds, in the type of the sums.
        own: This rank's of them.
        results: The same parts of the tensor itself.
        result: This rank's of them.
    """

    slices: list[Tensor]
    own: Tensor
    results: list[Tensor]
    result: Tensor

    def without_sums(self) -> _Piece:
        """Return the piece when its sums are no longer needed: they may be twice the tensor."""
        return _Piece(self.results, self.result, self.results, self.result)


def _wait(handle: Handle | None) -> None:
    assert handle is not None
    handle.wait()
