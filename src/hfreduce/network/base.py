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
    """One rank's end of what connects nodes; all of them make it together."""

    name: str

    @abstractmethod
    def all_gather(self, tensor: Tensor) -> list[Tensor]:
        """Return every node's tensor, by node: for the few numbers that are said before a call.

        Args:
            tensor: Contiguous, of one dimension, on the CPU; the same size and type on all.

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
            lane: 0 or 1. Calls of different lanes may be under way at once, in threads of their
                own; those of one lane are in the same order on all nodes.
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
