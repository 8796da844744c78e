"""Data sets as users write them; worker processes import them from here."""

from __future__ import annotations

from typing import Any

from torch import distributed
from torch.utils.data import Dataset as TorchDataset

from ffrecord import FileReader
from ffrecord.torch import Dataset, GlobalBatchSampler

N = 101


class Numbers(Dataset):
    """By `process`; it knows how many reads there were."""

    reads = 0

    def process(self, indices: list[int], data: list[Any]) -> list[int]:
        self.reads += 1
        return [int(bytes(record)) for record in data]


class OldStyle(Dataset):
    """As code for the original package has it: `__getitem__` of a list, no call of `__init__`."""

    def __init__(self, path: Any) -> None:
        self.source = FileReader(path, check_data=True)

    def __len__(self) -> int:
        return self.source.n

    def __getitem__(self, indices: list[int]) -> list[int]:
        assert isinstance(indices, list)
        return [int(bytes(record)) for record in self.source.read(indices)]


class Broken(Numbers):
    def process(self, indices: list[int], data: list[Any]) -> list[int]:
        if 77 in indices:
            raise LookupError("no such class")
        return super().process(indices, data)


class BrokenOldStyle(OldStyle):
    def __getitem__(self, indices: list[int]) -> list[int]:
        if 77 in indices:
            raise LookupError("no such class")
        return super().__getitem__(indices)


class Letters(TorchDataset[str]):
    """One of torch's own kind, indexed by one integer."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> str:
        return "abc"[index]


def indices_of_a_rank(store: str, rank: int) -> list[list[int]]:
    """Join a group of two and take the part of epoch 0 that falls to this process."""
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        return list(GlobalBatchSampler(N, 10, seed=3))
    finally:
        distributed.barrier()  # the other one may still be connecting
        distributed.destroy_process_group()


def complaint_of_a_rank(store: str, rank: int) -> str:
    """Make a sampler before joining a group of two; return what iterating says afterwards."""
    early = GlobalBatchSampler(N, 10)
    told = GlobalBatchSampler(N, 10, rank=rank, world_size=2)
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        assert len(list(told)) == 11
        iter(early)
    except RuntimeError as error:
        return str(error)
    finally:
        distributed.barrier()  # the other one may still be connecting
        distributed.destroy_process_group()
    return ""
