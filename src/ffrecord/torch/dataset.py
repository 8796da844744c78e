"""Data sets that are indexed by a list: a batch is one read.

`dataset[[3, 1, 3]]` returns three samples. torch's loader reaches it through `__getitems__`, its
hook for whole batches. Subsets and concatenations pass lists on, so a batch stays one read for
each reader.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset as TorchDataset

from ffrecord.errors import DamagedFileError
from ffrecord.paths import PathLike
from ffrecord.reader import FileReader, Record
from ffrecord.store_options import StoreOptions
from ffrecord.torch.registry import ReaderRegistry


class SampleError(RuntimeError):
    """A sample of a batch could not be made; the message names it, its file and the failure."""


class Dataset(ReaderRegistry, TorchDataset[Any]):
    """Records as samples.

    Override `process` to make samples from bytes; or, without calling `__init__`, `__len__` and
    `__getitem__`, which takes a list of indices and returns a list of samples.

    Args:
        fnames: As for `ffrecord.FileReader`, which also says what is raised.
        check_data: Likewise.
        storage: Likewise.

    Attributes:
        reader: The `FileReader`.
    """

    def __init__(
        self,
        fnames: PathLike | Iterable[PathLike],
        check_data: bool = True,
        *,
        storage: StoreOptions | None = None,
    ) -> None:
        self.reader = FileReader(fnames, check_data, storage=storage)

    def process(self, indices: list[int], data: list[Record]) -> Sequence[Any]:
        """Turn a batch of records into samples, one for each; the records themselves by default.

        The records of one batch share one block of memory.
        """
        return data

    def __getitem__(self, indices: Any) -> Any:
        """Return the samples at a list of indices, in its order.

        Raises:
            TypeError: `indices` is a single integer.
            IndexError: An index is out of range.
            RecordError: A record is damaged; the message names file and index.
        """
        wanted = _as_list(indices)
        samples: Any = self.process(wanted, self.reader.read(wanted))
        if samples is None:
            name = f"{type(self).__name__}.process"
            raise TypeError(f"{name} returned None: return a list with a sample for each record")
        return samples

    def __getitems__(self, indices: list[int]) -> Any:
        """Return the samples of a batch: what torch's loader calls.

        Raises:
            RecordError: A record is damaged; the message names file and index.
            SampleError: Something else failed; the message names the sample and its file.
            TypeError: The indices are batches themselves.
        """
        if indices and isinstance(indices[0], (list, tuple)):
            raise TypeError(
                "each index is a list of indices: a sampler of batches, such as "
                "GlobalBatchSampler, is passed as batch_sampler= and not as sampler="
            )
        try:
            return self[indices]
        except (DamagedFileError, SampleError, TimeoutError):
            raise  # it says what failed; to ask a store again would take as long again
        except Exception as failure:
            self._name_failure(indices, failure)
            raise

    def __len__(self) -> int:
        return self.reader.n

    def __add__(self, other: TorchDataset[Any]) -> ConcatDataset:  # type: ignore[override]
        return ConcatDataset([self, other])

    def _name_failure(self, indices: list[int], failure: Exception) -> None:
        """Find the sample that fails by asking for one at a time."""
        for index in indices:
            try:
                self[[index]]
            except Exception as error:
                raise SampleError(
                    f"sample {index} of {', '.join([type(self).__name__, *self._files_of(index)])}"
                    f": {type(error).__name__}: {error}"
                ) from failure

    def _files_of(self, index: int) -> list[str]:
        """Return the files of a sample's records, as far as its index is theirs too."""
        return [
            reader.file_of(index)
            for reader in self.ffreaders()
            if reader.n == len(self) and -reader.n <= index < reader.n
        ]


class Subset(Dataset):
    """Some samples of a data set, in a given order.

    Args:
        dataset: What they are taken from; one that is indexed by single integers will do.
        indices: Which; more than once too.
    """

    def __init__(self, dataset: TorchDataset[Any], indices: Sequence[int]) -> None:
        self.dataset = dataset
        self.indices = indices

    def __getitem__(self, indices: Any) -> Any:
        wanted = _in_range(_as_list(indices), len(self)).tolist()
        return _samples(self.dataset, [int(self.indices[index]) for index in wanted])

    def __len__(self) -> int:
        return len(self.indices)


class ConcatDataset(Dataset):
    """Data sets one after the other; a batch is one list for each that it touches.

    Args:
        datasets: One or more; those that are indexed by single integers will do.

    Raises:
        ValueError: There is none.
    """

    def __init__(self, datasets: Iterable[TorchDataset[Any]]) -> None:
        self.datasets = list(datasets)
        if not self.datasets:
            raise ValueError("there is no data set: give one or more")
        self._ends = np.cumsum([_length(dataset) for dataset in self.datasets])

    @property
    def cumulative_sizes(self) -> list[int]:
        """Where each data set ends, as torch's ConcatDataset has it."""
        return [int(end) for end in self._ends]

    def __getitem__(self, indices: Any) -> Any:
        wanted = _in_range(_as_list(indices), len(self))
        owners = np.searchsorted(self._ends, wanted, side="right")
        samples: list[Any] = [None] * len(wanted)
        for owner in np.unique(owners):
            members = np.flatnonzero(owners == owner)
            dataset = self.datasets[owner]
            local = wanted[members] - (self._ends[owner] - _length(dataset))
            for member, sample in zip(members, _samples(dataset, local.tolist()), strict=True):
                samples[member] = sample
        return samples

    def __len__(self) -> int:
        return int(self._ends[-1])


def _as_list(indices: Any) -> list[int]:
    if np.ndim(indices) != 1:
        raise TypeError(f"a data set of records takes a list of indices, not {indices!r}")
    return [int(index) for index in indices]


def _in_range(indices: list[int], n: int) -> NDArray[np.int64]:
    wanted = np.array(indices, np.int64)
    outside = (wanted < -n) | (wanted >= n)
    if outside.any():
        raise IndexError(f"sample {wanted[outside][0]} is out of range: there are {n}")
    return np.where(wanted < 0, wanted + n, wanted)


def _length(dataset: TorchDataset[Any]) -> int:
    return len(dataset)  # type: ignore[arg-type]


def _samples(dataset: TorchDataset[Any], indices: list[int]) -> Any:
    """Return samples by the batch hook where there is one, else one by one."""
    hook = getattr(dataset, "__getitems__", None)
    return hook(indices) if hook else [dataset[index] for index in indices]
