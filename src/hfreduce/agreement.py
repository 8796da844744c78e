"""What all ranks of several nodes are about to call, compared before anything of it is sent.

Within a node the engine compares calls by itself. Between nodes a network moves bytes: it would add
integers to floats, and one that expects other sizes may end the process. So each call of a
`HierarchicalReducer` begins with a header: the ranks of a node tell each other theirs, each column
tells the other nodes its node's, and ranks without a network are told by their node's first. So all
ranks know the same and say the same; it costs one small message a node.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from hfreduce.dtypes import DTYPES, OPS
from hfreduce.errors import MismatchError, PeerError
from hfreduce.network import Network
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


def agree(
    mine: Call,
    labels: list[str],
    local: Reducer,
    network: Network | None,
    columns: int,
    nodes: int,
) -> None:
    """Return when all ranks have come to call the same.

    Args:
        mine: This rank's call.
        labels: How messages call each rank.
        local: The ranks of this node.
        network: To the other nodes, for the first `columns` ranks of the node.
        columns: How many ranks of each node have one.
        nodes: How many there are.

    Raises:
        MismatchError: They do not, on every rank.
        PeerError: A rank died or came too late.
    """
    rows = mine.header().view(1, NUMBERS)
    if local.world_size > 1:
        own, rows = rows, torch.empty(local.world_size, NUMBERS, dtype=torch.int64)
        local.all_gather(rows, own)
    calls = [Call(*row) for row in rows.tolist()]
    # Of a node: its first rank's, and the first that differs from it.
    other = next((call for call in calls if call.what != calls[0].what), calls[0])
    said = torch.stack([calls[0].header(), other.header()])
    everyone = torch.empty(nodes, *said.shape, dtype=torch.int64)
    if network is not None:
        torch.stack(network.all_gather(said.view(-1)), out=everyone.view(nodes, -1))
    if local.world_size > columns:
        local.broadcast(everyone, 0)
    calls = [Call(*row) for row in everyone.view(-1, NUMBERS).tolist()]
    differing = [call for call in calls if call.what != calls[0].what]
    if not differing:
        return
    # Who raises breaks the node's group, which the others may be reading still.
    with suppress(PeerError):
        local.barrier()
    first = calls[0]
    blamed = first if mine.what != first.what else differing[0]
    raise MismatchError(
        f"the ranks called different things: {labels[first.rank]} {first}, "
        f"{labels[differing[0].rank]} {differing[0]}; all ranks make the same calls in the same "
        f"order",
        blamed.rank,
    )
