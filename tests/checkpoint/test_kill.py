"""A save killed before, after or within any of its calls to the file system harms nothing.

The process counts its own calls, those of the native part too, and kills itself at one; each
boundary has a process of its own, so none is left out in the long campaign. Then a new process must
find the last checkpoint that was committed, whole.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from hfai import checkpoint
from hfai.checkpoint.api import locate
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.peers import Peers
from hfai.checkpoint.saver import Saver
from hfai.checkpoint.state import capture
from hfai.checkpoint.storage import local, local_files, local_names
from hfai.checkpoint.verify import verify

CALLS = ("mkdir", "open", "pwritev", "pwrite", "fsync", "rename", "unlink", "rmdir", "close")
# Every boundary, on the disk; without it every third, and of two ranks every eleventh:
# HFAI_CHECKPOINT_KILLS=all pytest --timeout=0 tests/checkpoint/test_kill.py
ALL = os.environ.get("HFAI_CHECKPOINT_KILLS") == "all"


def state(value: float) -> dict[str, torch.Tensor]:
    # The second has two chunks.
    return {
        "a": torch.full((3000,), value),
        "b": torch.full((1_100_000,), value),
        "c": torch.full((5,), value),
    }


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """A directory in memory where there is one: hundreds of saves flush their files.

    A killed process loses nothing that a disk would keep.
    """
    if ALL or not os.access("/dev/shm", os.W_OK):
        yield tmp_path
        return
    with tempfile.TemporaryDirectory(prefix="hfai-kill-", dir="/dev/shm") as directory:
        yield Path(directory)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Let torch start no threads, which a forked child would wait for in vain."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Counter:
    """Stands before the system calls of this process; kills it at boundary `at`."""

    def __init__(self, at: int) -> None:
        self.at, self.count = at, 0

    def boundary(self) -> None:
        if self.count == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1

    def wrap(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **options: Any) -> Any:
            self.boundary()
            if name == "pwritev" and self.count == self.at:  # within: half of it is written
                descriptor, views, offset = arguments
                half = bytes(views[0])[: max(1, len(views[0]) // 2)]
                os.pwrite(descriptor, half, offset)
                self.boundary()
            result = call(*arguments, **options)
            self.boundary()
            return result

        return counted

    def install(self) -> None:
        for name in CALLS:
            setattr(os, name, self.wrap(getattr(os, name), name))
        local.exchange = local_names.exchange = self.wrap(local_names.exchange, "exchange")
        if local_files.native is not None:  # which makes its own calls
            local_files.native.set_probe(self.boundary)


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process; return its exit status: 0, or the signal's number below 0."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def committed(directory: Path) -> list[float]:
    """The values of all checkpoints that can be seen; each must be whole."""
    found = []
    for name in locate(directory).children():
        with CheckpointFiles(directory / name) as files:
            assert verify(files, 1) == []
        tensors = checkpoint.load(directory / name)["model"].values()
        values = {float(tensor[at]) for tensor in tensors for at in (0, -1)}
        assert len(values) == 1, "a checkpoint of two saves"
        found.append(values.pop())
    return found


def boundaries(directory: Path, save: Callable[[Path], object]) -> int:
    """Count the boundaries of a save."""
    report = directory.with_suffix(".count")

    def work() -> None:
        counter = Counter(-1)
        counter.install()
        save(directory)
        Path(report).write_text(str(counter.count))

    assert in_child(work) == 0
    return int(report.read_text())


def save_step(directory: Path, value: float) -> None:
    checkpoint.save(directory / f"step-{int(value):08d}", state(value), rng=False, threads=1)


def save_over(directory: Path, value: float) -> None:
    checkpoint.save(directory / "a", state(value), rng=False, threads=1)


def save_beside(directory: Path, value: float) -> None:
    """Save in the background, past the page cache where that can be."""
    path = directory / f"step-{int(value):08d}"
    checkpoint.save_async(path, state(value), rng=False, threads=1, host_budget=64 << 20).wait()


def save_huge(directory: Path, value: float) -> None:
    """Save in memory, by huge pages."""
    local_files.native.force_huge_pages(True)
    tensors = {**state(value), "d": torch.full((2_500_000,), value)}
    checkpoint.save(directory / f"step-{int(value):08d}", tensors, rng=False, threads=1)


@pytest.fixture
def memory() -> Iterator[Path | None]:
    """A directory in memory; None where there is none, or no native part to use it."""
    if local_files.native is None or not os.access("/dev/shm", os.W_OK):
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="hfai-kill-", dir="/dev/shm") as directory:
        yield Path(directory)
    local_files.native.force_huge_pages(None)


@pytest.mark.parametrize("save", [save_step, save_over, save_beside, save_huge])
def test_a_kill_at_any_boundary_leaves_the_old_or_the_new_checkpoint(
    save: Callable[[Path, float], None], place: Path, tmp_path: Path, memory: Path | None
) -> None:
    if save is save_beside:
        place = tmp_path  # on a disk, if there is one
    if save is save_huge:
        if memory is None:
            pytest.skip("needs the native part and /dev/shm")
        place = memory
    trial = place / "trial"
    save(trial, 1.0)
    count = boundaries(trial, lambda directory: save(directory, 2.0))
    assert count > 30
    outcomes = set()
    first = random.randrange(3)
    for at in range(count) if ALL else range(first, count, 3):
        directory = place / f"at{at}"
        save(directory, 1.0)

        def work(at: int = at, directory: Path = directory) -> None:
            Counter(at).install()
            save(directory, 2.0)

        assert in_child(work) == -signal.SIGKILL
        found = committed(directory)
        assert found in ([1.0], [2.0], [1.0, 2.0]), f"killed at boundary {at}"
        if save is not save_over:
            assert 1.0 in found, f"killed at boundary {at}"
        outcomes.add(found[-1])
        # The next job removes what is left, and saves again.
        locate(directory).sweep()
        assert [name for name in os.listdir(directory) if name.startswith(".")] == []
        save(directory, 3.0)
        assert committed(directory)[-1] == 3.0
        shutil.rmtree(directory)
    assert outcomes == {1.0, 2.0}, "some kills come before the commit and some behind it"


def ranks_saving(directory: Path, store: Path, rank: int, counter: Counter) -> None:
    """One of two ranks that save together, and find each other through a file."""
    shared: Any = dist.FileStore(str(store), 2)  # type: ignore[attr-defined]
    saver = Saver(Peers.of_store(shared, rank, 2, timeout=1.0), 1)
    counter.install()
    saver.save(
        locate(directory / "step-00000002"),
        lambda: capture(state(2.0), None, None, None, None, None, False, rank),
        2,
        None,
    )


def _kills(count: int) -> Iterator[int]:
    yield from range(count) if ALL else range(0, count, 11)


def test_a_rank_killed_at_any_boundary_leaves_the_old_checkpoint_or_a_whole_new_one(
    place: Path,
) -> None:
    counts = []
    for rank in range(2):
        report, store = place / f"count{rank}", place / f"store{rank}"

        def count(rank: int = rank, report: Path = report, store: Path = store) -> None:
            counter = Counter(-1)
            ranks_saving(place / f"trial{rank}", store, rank, counter)
            report.write_text(str(counter.count))

        other = os.fork()
        if other == 0:
            ranks_saving(place / f"trial{rank}", store, 1 - rank, Counter(-1))
            os._exit(0)
        assert in_child(count) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]) == 0
        counts.append(int(report.read_text()))
        assert committed(place / f"trial{rank}") == [2.0]
    for rank, count_of in enumerate(counts):
        for at in _kills(count_of):
            directory, store = place / f"r{rank}at{at}", place / f"s{rank}at{at}"
            save_step(directory, 1.0)
            survivor = os.fork()
            if survivor == 0:
                code = 1
                try:
                    ranks_saving(directory, store, 1 - rank, Counter(-1))
                    code = 0
                except checkpoint.CheckpointError:
                    code = 7
                finally:
                    os._exit(code)

            def work(rank: int = rank, at: int = at, d: Path = directory, s: Path = store) -> None:
                ranks_saving(d, s, rank, Counter(at))

            # How often a rank looks at a file depends on the other: the last may not be reached.
            assert in_child(work) in (-signal.SIGKILL, 0)
            code = os.waitstatus_to_exitcode(os.waitpid(survivor, 0)[1])
            found = committed(directory)
            assert found in ([1.0], [1.0, 2.0])
            assert code in (0, 7)
            if code == 0:
                assert found == [1.0, 2.0], "a rank was told of a checkpoint that is not there"
