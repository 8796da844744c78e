"""What all ranks of several nodes are about to call, compared before anything of it is sent.

Within a node the engine compares calls by itself. Between nodes a network moves bytes: it would add
integers to floats, and one that expects other sizes may end the process. So each call of a
`HierarchicalReducer` begins with a header: the ranks of a node tell each other theirs, the first of
them tells the other nodes and is told theirs, and hands those on. So all ranks know the same and
say the same; it costs one round of one message a node.

A small tensor needs no round of its own: the node's sum of it goes in the header's message, and
the whole sum comes back with what is handed on. The message says how long it is by what is called,
so one that came with another tensor, or with none, is an error in words like any other.
"""

from __future__ import annotations

import struct
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from hfreduce.dtypes import DTYPES, OPS, is_narrow
from hfreduce.errors import MismatchError, PeerError
from hfreduce.network import Network
from hfreduce.network.sums import combine, finish
from hfreduce.reducer import Reducer

KINDS = ("barrier", "all_reduce")
_NUMBERS = struct.Struct("=6q")  # of a call: its rank, and what all ranks have to agree on
_WHAT = slice(8, None)
_HEAD = 2 * _NUMBERS.size  # bytes that a node says: its first call, and one that differs from it


@dataclass(frozen=True)
class Call:
    """What a rank calls.

    Attributes:
        rank: Of the group.
        kind: Of `KINDS`, by number.
        op: Of `dtypes.OPS`, by number.
        dtype: Of `dtypes.DTYPES`, by number.
        count: Elements.
        sequence: Calls that the rank has made before.
    """

    rank: int
    kind: int
    op: int
    dtype: int
    count: int
    sequence: int

    @classmethod
    def of(cls, rank: int, kind: str, op: str, tensor: Tensor, sequence: int) -> Call:
        """Return the call of a rank."""
        numbers = KINDS.index(kind), OPS[op], DTYPES[tensor.dtype]
        return cls(rank, *numbers, tensor.numel(), sequence)

    def header(self) -> bytes:
        """Return it as bytes that can be sent."""
        return _NUMBERS.pack(self.rank, self.kind, self.op, self.dtype, self.count, self.sequence)

    @classmethod
    def read(cls, header: bytes) -> Call:
        """Return the call of a header."""
        return cls(*_NUMBERS.unpack(header))

    def __str__(self) -> str:
        if self.kind == KINDS.index("barrier"):
            return f"barrier (call {self.sequence})"
        op = next(name for name, number in OPS.items() if number == self.op)
        dtype = next(known for known, number in DTYPES.items() if number == self.dtype)
        name = str(dtype).removeprefix("torch.")
        return f"all_reduce ({op}) of {self.count} {name} (call {self.sequence})"


# What goes with the header, in bytes that a node sends to all others: up to here a round of its own
# would cost more than to send the whole to everyone.
SMALL_BYTES = 64 << 10


@dataclass(frozen=True)
class Reduction:
    """What an all-reduce does with its tensor.

    Attributes:
        op: "sum", "min" or "max", of all tensors.
        divisor: What their sum is divided by, before it is rounded.
        wide: The type of sums that are not whole yet.
    """

    op: str
    divisor: int
    wide: torch.dtype

    @classmethod
    def of(cls, op: str, dtype: torch.dtype, world_size: int) -> Reduction:
        """Return it for an operation that may be an average."""
        step, divisor = ("sum", world_size) if op == "avg" else (op, 1)
        # The least and the greatest are exact in any type.
        wide = torch.float32 if step == "sum" and is_narrow(dtype) else dtype
        return cls(step, divisor, wide)

    def is_small(self, count: int, nodes: int) -> bool:
        """Say whether so many elements go along with the header."""
        return count * self.wide.itemsize * (nodes - 1) <= SMALL_BYTES


class Agreement:
    """Where the calls of one rank begin.

    Args:
        labels: How messages call each rank.
        local: The ranks of this node.
        network: To the other nodes; the first rank of each node has one.
        nodes: How many there are, from 2.
    """

    def __init__(
        self, labels: list[str], local: Reducer, network: Network | None, nodes: int
    ) -> None:
        self._labels, self._local, self._nodes = labels, local, nodes
        self._network = network
        self._room = _HEAD + SMALL_BYTES // (nodes - 1)
        self._bytes = bytearray(self._room)
        self._frame = torch.frombuffer(self._bytes, dtype=torch.uint8)

    def reach(self, mine: Call, small: tuple[Tensor, Reduction] | None = None) -> None:
        """Return when all ranks have come to call the same, and what is small has been reduced.

        Args:
            mine: This rank's call.
            small: Is reduced over all ranks, in place: contiguous, of one dimension.

        Raises:
            MismatchError: They do not, on every rank; nothing has changed.
            PeerError: A rank died or came too late.
        """
        first, other = self._within_node(mine.header())
        if first[_WHAT] != other[_WHAT]:
            small = None  # on all ranks of the node
        nbytes = _HEAD
        if small:
            nbytes += self._sum_of_node(*small)
        shared = self._local.world_size > 1
        result = torch.empty_like(small[0]) if small and shared else small[0] if small else None
        said = b""
        if self._local.rank == 0:
            said = self._between_nodes(first + other, nbytes, small, result)
        if shared:
            said = self._handed_on(said, result)
        calls = [said[at:][: _NUMBERS.size] for at in range(0, len(said), _NUMBERS.size)]
        if differing := [call for call in calls if call[_WHAT] != calls[0][_WHAT]]:
            # Who raises breaks the node's group, which the others may be reading still.
            with suppress(PeerError):
                self._local.barrier()
            raise self._mismatch(mine, Call.read(calls[0]), Call.read(differing[0]))
        if small and result is not None and shared:
            small[0].copy_(result)

    def _within_node(self, header: bytes) -> tuple[bytes, bytes]:
        """Return what a node's first rank calls, and the first that differs, or the same."""
        if self._local.world_size == 1:
            return header, header
        own = torch.frombuffer(bytearray(header), dtype=torch.uint8)
        rows = torch.empty(self._local.world_size, _NUMBERS.size, dtype=torch.uint8)
        self._local.all_gather(rows, own)
        calls = [bytes(row) for row in rows.tolist()]
        return calls[0], next((c for c in calls if c[_WHAT] != calls[0][_WHAT]), calls[0])

    def _sum_of_node(self, data: Tensor, how: Reduction) -> int:
        """Put the sum of a node's tensors into its first rank's frame, and return its bytes."""
        total = self._total(data.numel(), how)
        total.copy_(data)
        if self._local.world_size > 1:
            self._local.reduce(total, 0, how.op)
        return total.nbytes

    def _total(self, count: int, how: Reduction) -> Tensor:
        return self._frame[_HEAD:][: count * how.wide.itemsize].view(how.wide)

    def _between_nodes(
        self,
        head: bytes,
        nbytes: int,
        small: tuple[Tensor, Reduction] | None,
        result: Tensor | None,
    ) -> bytes:
        """Return what all nodes say, one after the other; write the sum, if they say the same."""
        assert self._network is not None
        self._bytes[:_HEAD] = head
        frames = self._network.tell(self._frame[:nbytes], self._room)
        heads = [bytes(frame[:_HEAD].tolist()) for frame in frames]
        whats = {
            part[_WHAT] for said in heads for part in (said[: _NUMBERS.size], said[_NUMBERS.size :])
        }
        if small and result is not None and len(whats) == 1:
            how = small[1]
            total = self._total(result.numel(), how)
            parts = [frame[_HEAD:][: total.nbytes].view(how.wide) for frame in frames]
            combine(parts, total, how.op)
            finish(total, result, how.divisor)
        return b"".join(heads)

    def _handed_on(self, said: bytes, result: Tensor | None) -> bytes:
        """Give a node's ranks what its first was told, with the sum."""
        length = self._nodes * _HEAD
        reply = torch.empty(length + (0 if result is None else result.nbytes), dtype=torch.uint8)
        if self._local.rank == 0:
            reply[:length] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
            if result is not None:
                reply[length:].view(result.dtype).copy_(result)
        self._local.broadcast(reply, 0)
        if result is not None:
            result.copy_(reply[length:].view(result.dtype))
        return bytes(reply[:length].tolist())

    def _mismatch(self, mine: Call, first: Call, differing: Call) -> MismatchError:
        return MismatchError(
            f"the ranks called different things: {self._labels[first.rank]} {first}, "
            f"{self._labels[differing.rank]} {differing}; all ranks make the same calls in the "
            f"same order",
            first.rank if mine.header()[_WHAT] != first.header()[_WHAT] else differing.rank,
        )
