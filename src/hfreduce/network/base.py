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
    def all_reduce(self, tensor: Tensor, op: str, lane: int = 0) -> None:
        """Reduce over the nodes, in place, with the same bits on all.

        Args:
            tensor: Contiguous, of one dimension, on the CPU; the same size on all.
            op: "sum", "avg", "min" or "max".
            lane: 0 or 1. Calls of different lanes may be under way at once, in threads of their
                own; those of one lane are in the same order on all nodes.

        Raises:
            DeadPeerError: A node is gone.
            LatePeerError: A node did not come within the timeout.
        """

    @abstractmethod
    def close(self) -> None:
        """Hang up: the others' calls end with an error, as does one under way here."""
