"""Which records each rank reads, in which batch, and how that goes on after a stop.

An epoch is one order of all records, cut into global batches: `global_batch` positions each. Rank r
of W takes positions r, r + W, r + 2 W … of every global batch, so what a global batch holds depends
neither on W nor on worker processes. The only state is how many samples of which epoch all ranks
together have taken. It is counted where batches arrive (`advance`), not where they are planned:
worker processes plan ahead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any, Literal

import numpy as np
from torch import distributed
from torch.utils.data import Sampler

from ffrecord.torch.permutation import Permutation

_VERSION = 1
_TAILS = ("pad", "drop", "uneven")


class GlobalBatchSampler(Sampler[list[int]]):
    """A batch sampler for `DataLoader(dataset, batch_sampler=…)`: this rank's part of each batch.

    Iterating starts at `consumed` samples of `epoch`, so also after a loop that was left early.
    `ffrecord.torch.DataLoader` counts what it hands out, and starts the next epoch when one is
    through. With another loader call `advance()` for every batch taken, and `set_epoch`.

    Args:
        dataset: Anything with a length, or that length.
        global_batch: Samples a batch, of all ranks together; a multiple of `world_size`.
        seed: Chooses the orders.
        shuffle: False reads the records in their own order.
        tail: What becomes of a last batch that is not full. "pad": it is filled from the start of
            the epoch's order. "drop": it is left out. "uneven": it stays as it is, and some ranks
            get one sample less, or have one batch less (see `tail_sizes`).
        rank: By default torch.distributed's where it is initialised, else 0.
        world_size: Likewise, else 1.

    Attributes:
        epoch: The epoch that an iteration continues, from 0.
        consumed: Samples of it that all ranks together have taken.

    Raises:
        ValueError: There are no records, or arguments contradict each other.
        RuntimeError: On iterating, by all ranks alike: torch.distributed was initialised after the
            sampler was made, so that every rank would read everything.
    """

    def __init__(
        self,
        dataset: Sized | int,
        global_batch: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        tail: Literal["pad", "drop", "uneven"] = "pad",
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        grouped = _grouped()
        self._by_default = rank is None and world_size is None
        if world_size is None:
            world_size = distributed.get_world_size() if grouped else 1
        if rank is None:
            rank = distributed.get_rank() if grouped else 0
        self.n = dataset if isinstance(dataset, int) else len(dataset)
        if self.n < 1:
            raise ValueError("there are no records to sample from")
        if not 0 <= rank < world_size:
            raise ValueError(f"rank is {rank}: give 0 to {world_size - 1}, the last of world_size")
        if global_batch < 1 or global_batch % world_size:
            raise ValueError(
                f"global_batch is {global_batch}: give a multiple of world_size, {world_size}"
            )
        if not -(1 << 63) <= seed < 1 << 63:
            raise ValueError(f"seed is {seed}: give a signed integer of 64 bits")
        if tail not in _TAILS:
            raise ValueError(f'tail is {tail!r}: give "pad", "drop" or "uneven"')
        if tail == "drop" and self.n < global_batch:
            raise ValueError(
                f'tail "drop" would leave out all {self.n} records: global_batch is {global_batch}'
            )
        self.global_batch = global_batch
        self.seed = seed
        self.shuffle = shuffle
        self.tail = tail
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0
        self.consumed = 0

    def __iter__(self) -> Iterator[list[int]]:
        if self._by_default and _grouped() and distributed.get_world_size() != self.world_size:
            raise RuntimeError(
                f"this sampler was made for {self.world_size} rank(s), before torch.distributed "
                f"was initialised with {distributed.get_world_size()}: make it afterwards (with "
                "Lightning in train_dataloader), or give rank and world_size"
            )
        return self._rest()

    def _rest(self) -> Iterator[list[int]]:
        order = Permutation(self.n, self.seed, self.epoch) if self.shuffle else None
        for start in range(self.consumed, self.n, self.global_batch):
            stop = start + self.global_batch
            if stop > self.n and self.tail == "drop":
                return
            if self.tail == "uneven":
                stop = min(stop, self.n)
            mine = np.arange(start + self.rank, stop, self.world_size) % self.n
            if len(mine):
                yield (mine if order is None else order(mine)).tolist()

    def __len__(self) -> int:
        """Return this rank's batches in a whole epoch; `remaining` counts what is left of one."""
        return self._batches(self.n)

    @property
    def sampler(self) -> GlobalBatchSampler:
        """This sampler itself, by the name under which Lightning looks for `set_epoch`.

        Lightning stops after `len` batches and not at an iteration's end, so a loader alone would
        not learn that the epoch is over.
        """
        return self

    @property
    def remaining(self) -> int:
        """This rank's batches from `consumed` to the end of the epoch."""
        return self._batches(self.n - self.consumed)

    def tail_sizes(self) -> list[int]:
        """Return how many samples each rank gets of an epoch's last batch, by rank."""
        left = self.n % self.global_batch
        if left == 0 or self.tail != "uneven":
            return [self.global_batch // self.world_size] * self.world_size
        return [len(range(rank, left, self.world_size)) for rank in range(self.world_size)]

    def advance(self, batches: int = 1) -> None:
        """Count batches as taken."""
        self.consumed = min(self.n, self.consumed + batches * self.global_batch)

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch; the one that is under way goes on where it is."""
        if epoch != self.epoch:
            self.epoch, self.consumed = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Return where the ranks are: integers and a bool, equal on all ranks after equal steps."""
        return {
            "version": _VERSION,
            "n": self.n,
            "seed": self.seed,
            "shuffle": self.shuffle,
            "epoch": self.epoch,
            "consumed": self.consumed,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where a state was taken; ranks, workers and batch may be others than then.

        Raises:
            ValueError: The state is of another version, or of another number of records.
        """
        if state["version"] != _VERSION:
            raise ValueError(f"the state has version {state['version']}, this is {_VERSION}")
        if state["n"] != self.n:
            raise ValueError(f"the state is of {state['n']} records, there are {self.n} now")
        if not 0 <= state["consumed"] <= self.n:
            raise ValueError(f"the state has consumed {state['consumed']} of {self.n} records")
        self.seed, self.shuffle = state["seed"], state["shuffle"]
        self.epoch, self.consumed = state["epoch"], state["consumed"]

    def _batches(self, samples: int) -> int:
        whole, left = divmod(samples, self.global_batch)
        partial = {"pad": left > 0, "drop": False, "uneven": left > self.rank}[self.tail]
        return whole + partial


def _grouped() -> bool:
    return distributed.is_available() and distributed.is_initialized()
