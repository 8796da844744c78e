"""The interface of an engine between nodes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True)
class Place:
    """Which ranks of several nodes reduce together, one a node, and which of them this is.

    Attributes:
        rank: This node, from 0.
        size: The number of nodes.
        labels: How messages call each node's rank.
        ranks: Their ranks in the group of all nodes.
        store: Of their own.
        timeout: Seconds that one may be late.
    """

    rank: int
    size: int
    labels: list[str]
    ranks: list[int]
    store: Store
    timeout: float


class Network(ABC):
    """One rank's end of what connects nodes; all of them make it together.

    Attributes:
        name: As `choice.py` has it.
        lanes: How many all-reduces may be under way at once.
    """

    name: str
    lanes: int = 2

    @abstractmethod
    def tell(self, frame: Tensor, room: int) -> list[Tensor]:
        """Give every node this one's bytes, and return every node's, by node.

        It is for what is said before a call, and for tensors that are small enough to go with it:
        a message a node, in one round.

        Args:
            frame: Contiguous bytes on the CPU, at most `room`; nodes may give different numbers.
            room: The same on all.

        Returns:
            Of `room` bytes each, of which those count that the node gave. They hold until the next
            call.

        Raises:
            DeadPeerError: A node is gone.
            LatePeerError: A node did not come within the timeout.
        """

    @abstractmethod
    def all_reduce(
        self, tensor: Tensor, op: str, lane: int = 0, *, out: Tensor, divisor: int = 1
    ) -> None:
        """Reduce over the nodes, with the same bits on all.

        Args:
            tensor: Contiguous, of one dimension, on the CPU; the same size and type on all. It is
                overwritten.
            op: "sum", "min" or "max".
            lane: From 0 to `lanes` - 1. Calls of different lanes may be under way at once, in
                threads of their own; those of one lane are in the same order on all nodes.
            out: Where the result goes, rounded once to its type, which may be narrower than the
                tensor's; or the tensor itself.
            divisor: What the result is divided by before it is rounded.

        Raises:
            DeadPeerError: A node is gone.
            LatePeerError: A node did not come within the timeout.
        """

    # A signal's handler that raises in the thread of a call ends the call at once.

    @abstractmethod
    def close(self) -> None:
        """Hang up: the others' calls end with an error, as does one under way here."""
