"""Which ranks sit on which node, and how many of each take part in the network."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Layout:
    """Who sits where.

    Attributes:
        nodes: The ranks of each node, in order; nodes in the order of their first ranks.
        columns: How many ranks of each node take part in the network: as many as the smallest has.
    """

    nodes: list[list[int]]
    columns: int

    @classmethod
    def of(cls, names: Sequence[str]) -> Layout:
        """Return the layout of ranks whose nodes have these names."""
        found: dict[str, list[int]] = {}
        for rank, name in enumerate(names):
            found.setdefault(name, []).append(rank)
        nodes = list(found.values())
        return cls(nodes, min(map(len, nodes)))

    def of_rank(self, rank: int) -> tuple[int, int]:
        """Return a rank's node and its place there."""
        node = next(i for i, ranks in enumerate(self.nodes) if rank in ranks)
        return node, self.nodes[node].index(rank)
