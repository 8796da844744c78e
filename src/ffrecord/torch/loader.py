"""torch's DataLoader with two additions: batches can be skipped unread, and arrivals are counted.

Skipping happens in the sampler, which is iterated all the same: random state moves on as if the
skipped batches had been read. Arrivals are counted for a `GlobalBatchSampler`, so that its state is
where the training is and not where the worker processes are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

from torch import Generator
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import IterableDataset, RandomSampler, Sampler, SequentialSampler

from ffrecord.torch.sampler import GlobalBatchSampler


class DataLoader(TorchDataLoader[Any]):
    """A `torch.utils.data.DataLoader` that can skip batches.

    Any data set of torch's kinds works. With a `GlobalBatchSampler` as `batch_sampler` its
    `consumed` counts each batch as it is handed out, and an iteration that comes to its end goes to
    the next epoch; iterate over one such loader at a time.

    Args:
        dataset: An `ffrecord.torch.Dataset`: a batch is one read. Or any other.
        batch_size: This and all others are torch's.
        shuffle: See there.
        sampler: See there.
        batch_sampler: See there.
        num_workers: See there.
        collate_fn: See there.
        pin_memory: See there.
        drop_last: See there.
        timeout: See there.
        worker_init_fn: See there.
        multiprocessing_context: See there.
        generator: See there.
        skippable: False leaves samplers unwrapped, for frameworks that replace them (Lightning);
            `set_step` is off then.
        options: torch's other keyword arguments.
    """

    def __init__(
        self,
        dataset: TorchDataset[Any],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Sampler[int] | Iterable[int] | None = None,
        batch_sampler: Sampler[list[int]] | Iterable[list[int]] | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: Generator | None = None,
        *,
        skippable: bool = True,
        **options: Any,
    ) -> None:
        self.skippable = skippable
        self._skipping: _SkippingSampler | None = None
        if not skippable or isinstance(dataset, IterableDataset):
            pass
        elif batch_sampler is not None:
            if not isinstance(batch_sampler, GlobalBatchSampler):
                batch_sampler = self._skipping = _SkippingSampler(batch_sampler, 1)
        elif sampler is None or not shuffle:
            if sampler is None:
                sampler = (
                    RandomSampler(dataset, generator=generator)  # type: ignore[arg-type]
                    if shuffle
                    else SequentialSampler(dataset)  # type: ignore[arg-type]
                )
            sampler = self._skipping = _SkippingSampler(sampler, batch_size or 1)
            shuffle = None
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            num_workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            **options,
        )

    def set_step(self, step: int) -> None:
        """Let iterations that start from now on skip their first batches, without reading them.

        It holds until the next call, `set_step(0)` before the next epoch as a rule. `len` is what
        is left.

        Raises:
            RuntimeError: The loader is not skippable, or has a `GlobalBatchSampler`.
            ValueError: There are not more than `step` batches.
        """
        if self._skipping is None:
            raise RuntimeError(
                "set_step works with skippable=True and a data set that is indexed; "
                "a GlobalBatchSampler resumes by load_state_dict"
            )
        total = len(self) + self._skipping.step
        if step != 0 and not 0 <= step < total:
            raise ValueError(f"step is {step}: give 0 to {total - 1}, there are {total} batches")
        self._skipping.step = step

    def state_dict(self) -> dict[str, Any]:
        """Return the `GlobalBatchSampler`'s place behind the last batch handed out; else nothing.

        Lightning calls this, and `load_state_dict`, where it saves and loads checkpoints.
        """
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            return self.batch_sampler.state_dict()
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on behind a place, in the next iteration.

        Raises:
            ValueError: There is no `GlobalBatchSampler` to go on with, or it has other records.
        """
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            self.batch_sampler.load_state_dict(state)
        elif state:
            raise ValueError(
                "the state is that of a GlobalBatchSampler: give this loader one as batch_sampler"
            )

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        if isinstance(self.batch_sampler, GlobalBatchSampler):
            return _counted(batches, self.batch_sampler, self.batch_sampler.epoch)
        return batches


class _SkippingSampler(Sampler[Any]):
    """Leaves out the first `step * each` items of a sampler, which answers everything else."""

    def __init__(self, sampler: Iterable[Any], each: int) -> None:
        self._sampler = sampler
        self._each = each
        self.step = 0

    def __iter__(self) -> Iterator[Any]:
        return islice(self._sampler, self.step * self._each, None)

    def __len__(self) -> int:
        return len(self._sampler) - self.step * self._each  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._sampler, name)


def _counted(batches: Iterator[Any], sampler: GlobalBatchSampler, epoch: int) -> Iterator[Any]:
    for batch in batches:
        sampler.advance()
        yield batch
    sampler.set_epoch(epoch + 1)
