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

from contextlib import suppress
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hfreduce.dtypes import DTYPES, OPS, is_narrow
from hfreduce.errors import MismatchError, PeerError
from hfreduce.network import Network
from hfreduce.network.sums import combine, finish
from hfreduce.reducer import Reducer

KINDS = ("barrier", "all_reduce")


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

    def header(self) -> Tensor:
        """Return it as numbers that can be sent."""
        return torch.tensor([getattr(self, field.name) for field in fields(self)])

    @property
    def what(self) -> tuple[int, ...]:
        """What all ranks have to agree on."""
        return self.kind, self.op, self.dtype, self.count, self.sequence

    def __str__(self) -> str:
        if self.kind == KINDS.index("barrier"):
            return f"barrier (call {self.sequence})"
        op = next(name for name, number in OPS.items() if number == self.op)
        dtype = next(known for known, number in DTYPES.items() if number == self.dtype)
        name = str(dtype).removeprefix("torch.")
        return f"all_reduce ({op}) of {self.count} {name} (call {self.sequence})"


NUMBERS = len(fields(Call))
_HEAD = 2 * NUMBERS * torch.int64.itemsize  # bytes: of a node, its first call and one that differs
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


def agree(
    mine: Call,
    labels: list[str],
    local: Reducer,
    network: Network | None,
    nodes: int,
    small: tuple[Tensor, Reduction] | None = None,
) -> None:
    """Return when all ranks have come to call the same, and what is small has been reduced.

    Args:
        mine: This rank's call.
        labels: How messages call each rank.
        local: The ranks of this node.
        network: To the other nodes; the first rank of each node has one.
        nodes: How many there are.
        small: Is reduced over all ranks, in place: contiguous, of one dimension.

    Raises:
        MismatchError: They do not, on every rank; nothing has changed.
        PeerError: A rank died or came too late.
    """
    rows = mine.header().view(1, NUMBERS)
    if local.world_size > 1:
        own, rows = rows, torch.empty(local.world_size, NUMBERS, dtype=torch.int64)
        local.all_gather(rows, own)
    calls = [Call(*row) for row in rows.tolist()]
    # Of a node: its first rank's, and the first that differs from it.
    other = next((call for call in calls if call.what != calls[0].what), calls[0])
    if other is not calls[0]:
        small = None  # on all ranks of the node
    said = torch.stack([calls[0].header(), other.header()])
    heads = nodes * _HEAD
    reply = torch.empty(heads + (small[0].nbytes if small else 0), dtype=torch.uint8)
    everyone = reply[:heads].view(torch.int64).view(nodes, 2, NUMBERS)
    total = _sum_of_node(small[0], small[1], local) if small else None
    if local.rank == 0:
        assert network is not None
        frames = _told(said, total, network, nodes)
        torch.stack(
            [frame[:_HEAD].view(torch.int64) for frame in frames], out=everyone.view(nodes, -1)
        )
        if small and total is not None and not _differing(everyone):
            data, how = small
            parts = [frame[_HEAD : _HEAD + total.nbytes].view(total.dtype) for frame in frames]
            combine(parts, total, how.op)
            finish(total, reply[heads:].view(data.dtype), how.divisor)
    if local.world_size > 1:
        local.broadcast(reply, 0)
    if differing := _differing(everyone):
        # Who raises breaks the node's group, which the others may be reading still.
        with suppress(PeerError):
            local.barrier()
        raise _mismatch(mine, Call(*everyone[0, 0].tolist()), differing[0], labels)
    if small:
        small[0].copy_(reply[heads:].view(small[0].dtype))


def _sum_of_node(data: Tensor, how: Reduction, local: Reducer) -> Tensor | None:
    """Return the sum of a node's tensors on its first rank; the tensors stay as they are."""
    total = data.to(how.wide, copy=local.rank == 0)
    if local.world_size > 1:
        local.reduce(total, 0, how.op)
    return total if local.rank == 0 else None


def _told(said: Tensor, total: Tensor | None, network: Network, nodes: int) -> list[Tensor]:
    """Return what each node says: its header, and what goes with it."""
    frame = said.view(-1).view(torch.uint8)
    if total is not None:
        frame = torch.cat([frame, total.view(torch.uint8)])
    return network.tell(frame, _HEAD + SMALL_BYTES // (nodes - 1))


def _differing(everyone: Tensor) -> list[Call]:
    calls = [Call(*row) for row in everyone.view(-1, NUMBERS).tolist()]
    return [call for call in calls if call.what != calls[0].what]


def _mismatch(mine: Call, first: Call, differing: Call, labels: list[str]) -> MismatchError:
    return MismatchError(
        f"the ranks called different things: {labels[first.rank]} {first}, "
        f"{labels[differing.rank]} {differing}; all ranks make the same calls in the same order",
        first.rank if mine.what != first.what else differing.rank,
    )
