"""Writing a whole data set: parts written by worker processes, renamed into place together."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ffrecord.parts import part_name
from ffrecord.paths import PathLike
from ffrecord.whole import whole_directory
from ffrecord.writer import FileWriter

if TYPE_CHECKING:
    from multiprocessing.synchronize import Event


class SizedDataset(Protocol):
    """What can be counted and indexed."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int, /) -> Any: ...


# Set in each worker, by inheritance (fork) or by pickle (spawn).
_work: tuple[SizedDataset, Callable[[Any], Any], Event] | None = None


class _Stopped(Exception):  # noqa: N818 (no error, and seen by nobody)
    """Another worker has failed."""


def dump(
    dataset: SizedDataset,
    fname: PathLike,
    nfiles: int,
    verbose: bool = False,
    *,
    serialize: Callable[[Any], Any] = pickle.dumps,
    workers: int | None = None,
    start_method: str | None = None,
    progress: Callable[[int], object] | None = None,
) -> None:
    """Write every item of a data set as a record.

    Args:
        dataset: What is written: items 0 to `len(dataset) - 1`.
        fname: A record file for one file, else a directory for `PART_00000.ffr` and so on, which
            appears when all parts are complete. It must not exist.
        nfiles: How many files; each gets ceil(n / nfiles) items, so there may be fewer.
        verbose: Print each file's name when it is written.
        serialize: Turns an item into bytes.
        workers: How many processes; one for each core, at most 16, by default.
        start_method: Of the worker processes ("fork", "spawn"); Python's default where None.
        progress: Called with the number of items in a file when it is written.

    Raises:
        FileExistsError: `fname` exists.
        BrokenProcessPool: A worker died. Nothing is left.
        Exception: What a worker raised. Nothing is left.
    """
    if nfiles < 1:
        raise ValueError(f"nfiles is {nfiles}: one file is the least")
    target, n = Path(fname), len(dataset)
    if target.exists():
        raise FileExistsError(f"{target} exists: remove it, or give another name")
    target.parent.mkdir(parents=True, exist_ok=True)
    if nfiles == 1:
        _write(dataset, serialize, None, str(target), 0, n)
        if verbose:
            print(target)
        if progress:
            progress(n)
        return
    each = max(1, -(-n // nfiles))
    starts = list(range(0, max(n, 1), each))
    if len(starts) < nfiles:
        warnings.warn(
            f"{n} items make {len(starts)} files of {each}, not {nfiles}", UserWarning, stacklevel=2
        )
    context = multiprocessing.get_context(start_method)
    stop = context.Event()
    count = min(len(starts), workers or min(16, len(os.sched_getaffinity(0))))
    with (
        whole_directory(target) as work,
        ProcessPoolExecutor(count, context, _start_worker, (dataset, serialize, stop)) as pool,
    ):
        tasks = {
            pool.submit(_work_on, str(work / part_name(k)), start, min(start + each, n)): k
            for k, start in enumerate(starts)
        }
        try:
            for task in as_completed(tasks):
                task.result()
                number = tasks[task]
                if verbose:
                    print(target / part_name(number))
                if progress:
                    progress(min(each, n - starts[number]))
        except BaseException:
            stop.set()
            pool.shutdown(cancel_futures=True)
            raise


def _start_worker(dataset: SizedDataset, serialize: Callable[[Any], Any], stop: Event) -> None:
    global _work
    _work = dataset, serialize, stop


def _work_on(path: str, start: int, stop: int) -> None:
    assert _work is not None
    _write(*_work, path, start, stop)


def _write(
    dataset: SizedDataset,
    serialize: Callable[[Any], Any],
    stop_now: Event | None,
    path: str,
    start: int,
    stop: int,
) -> None:
    with FileWriter(path, stop - start) as writer:
        for index in range(start, stop):
            if stop_now is not None and stop_now.is_set():
                raise _Stopped
            writer.write_one(serialize(dataset[index]))
