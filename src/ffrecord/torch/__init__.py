"""Record files in torch's data loading: a batch is one read, and an epoch goes on where it stopped.

A batch is one straight line: a sampler's list of indices → torch's `__getitems__` hook →
`FileReader.read(indices)` → `process` → the collate function. Everything rests on torch's public
interfaces; nothing in torch is changed.
"""

from ffrecord.torch.dataset import ConcatDataset, Dataset, SampleError, Subset
from ffrecord.torch.loader import DataLoader
from ffrecord.torch.permutation import Permutation
from ffrecord.torch.registry import ReaderRegistry
from ffrecord.torch.sampler import GlobalBatchSampler

__all__ = [
    "ConcatDataset",
    "DataLoader",
    "Dataset",
    "GlobalBatchSampler",
    "Permutation",
    "ReaderRegistry",
    "SampleError",
    "Subset",
]
