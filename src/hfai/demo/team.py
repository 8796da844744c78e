"""Training on several processes of this machine, data-parallel through hfreduce.

The process that the user started is rank 0: it shows, stops, saves and compares as ever. The others
do nothing but train beside it. All make the same global batches and take every n-th window, so the
average of their gradients is the gradient of one process with the whole batch, to rounding; every
window has as many predicted bytes as any other.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn
from torch import distributed as dist

import hfreduce
from haiscale.ddp import DistributedDataParallel
from hfai.client import ignore_in_worker
from hfai.demo.batches import Batch, Batches
from hfai.multiprocessing import spawn

if TYPE_CHECKING:
    from hfai.demo.settings import Settings

# Others may pack text, compile or write a file meanwhile.
TIMEOUT_SECONDS = 300.0


class Stop(Protocol):
    """Whether the training shall end after this step."""

    @property
    def requested(self) -> bool:
        """Whether it shall."""


class Team:
    """One process's part in the training of several.

    Args:
        rank: Of this process, from 0.
        size: The number of processes.
        store: A file that all of them reach.

    Attributes:
        waits: Seconds of each step from when this process had all its gradients until it had the
            average of all.
        steps: Seconds of each step.
    """

    def __init__(self, rank: int, size: int, store: str) -> None:
        self.rank, self.size = rank, size
        self.waits: list[float] = []
        self.steps: list[float] = []
        shared: Any = dist.FileStore(store, size)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=shared, rank=rank, world_size=size)
        self.reducer = hfreduce.Reducer(shared, rank, size, timeout=TIMEOUT_SECONDS, name="demo")

    def wrap(self, model: nn.Module, device: torch.device) -> nn.Module:
        """Return the model for training: all ranks start with rank 0's weights."""
        ids = [torch.cuda.current_device()] if device.type == "cuda" else None
        # The hook registered here is what `backend="hfreduce"` would register, with a clock.
        wrapped = DistributedDataParallel(model, device_ids=ids, backend="torch")
        self._clock = _Clock(device)
        wrapped.register_comm_hook(_Timed(self._clock), _timed)
        return wrapped

    def begin(self) -> None:
        """A step begins."""
        self._start = time.perf_counter()

    def averaged(self) -> None:
        """The backward pass has ended: this process has the average of all gradients."""
        self._clock.end()

    def finish(self, loss: Tensor) -> Tensor:
        """A step has ended; return the mean of all processes' losses."""
        mean = loss.detach().float().cpu().reshape(1)
        self.reducer.all_reduce(mean, "avg")
        self.waits.append(self._clock.seconds())
        self.steps.append(time.perf_counter() - self._start)
        return mean[0]

    def share(self, batches: Batches) -> Share:
        """Return this process's part of each batch."""
        return Share(batches, self.rank, self.size)

    def agree(self, stop: Stop | None) -> Agreed:
        """Return the stop of all: rank 0's."""
        return Agreed(self, stop)

    def leave(self) -> None:
        """End this process's part."""
        self.reducer.close()
        dist.destroy_process_group()


class Share:
    """Every n-th window of each of the global batches, from the rank-th on."""

    def __init__(self, batches: Batches, rank: int, size: int) -> None:
        self._batches, self._rank, self._size = batches, rank, size

    def __iter__(self) -> Iterator[Batch]:
        """Yield this process's windows, without end."""
        for batch in self._batches:
            yield Batch(*(tensor[self._rank :: self._size] for tensor in batch))

    def state_dict(self) -> dict[str, Any]:
        """Return the place behind the last batch that was handed out."""
        return self._batches.state_dict()


class Agreed:
    """A stop that all processes see after the same step; each looks once a step."""

    def __init__(self, team: Team, stop: Stop | None) -> None:
        self._team, self._stop = team, stop

    @property
    def requested(self) -> bool:
        """Whether rank 0 was asked to stop."""
        asked = torch.tensor([int(self._stop is not None and self._stop.requested)])
        self._team.reducer.all_reduce(asked, "max")
        return bool(asked.item())


class Helpers:
    """The other processes, while they train beside this one.

    Args:
        settings: Of the run.
        training: The record file of the windows.
        resume: The file of the run to go on with, or None.
        device: "cpu" or "cuda".
        size: The number of processes, this one among them.
    """

    def __init__(
        self, settings: Settings, training: Path, resume: Path | None, device: str, size: int
    ) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="hfai-demo-")
        store = f"{self._directory.name}/store"
        arguments = (store, size, settings, training, resume, device)
        self._others = spawn(_help, arguments, nprocs=size - 1, join=False, daemon=True)
        self._size, self._store = size, store

    def __enter__(self) -> Team:
        self._team = Team(0, self._size, self._store)
        return self._team

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._team.leave()
        for process in self._others.processes:
            process.join(10.0)
            if process.is_alive():
                process.kill()
                process.join()
        self._directory.cleanup()


def device_of(kind: str, rank: int) -> torch.device:
    """Return a process's device; processes share GPUs where there are fewer."""
    if kind != "cuda":
        return torch.device(kind)
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _help(
    index: int,
    store: str,
    size: int,
    settings: Settings,
    training: Path,
    resume: Path | None,
    kind: str,
) -> None:
    """Train as rank `index` + 1, and end quietly where rank 0 does."""
    from hfai.demo.state import RunState
    from hfai.demo.train import Course, DivergenceError, Trainer, train
    from hfai.nn import to_hfai

    # Ctrl-C reaches all, and so may what a cluster engine sends: rank 0 decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_in_worker()
    torch.set_num_threads(max(1, torch.get_num_threads() // size))
    team = Team(index + 1, size, store)
    device = device_of(kind, team.rank)
    torch.manual_seed(settings.seed)
    trainer = Trainer(to_hfai(settings.make_model().to(device)), settings, device)
    batches = Batches(training, settings.batch_size, settings.seed, settings.task)
    losses: list[float] = []
    if resume is not None:
        saved = RunState.load(resume)
        trainer.optimizer.load_state_dict(saved.optimizer)
        batches.load_state_dict(saved.place)
        losses = saved.losses
    trainer.join(team)
    try:
        train(
            trainer,
            team.share(batches),
            Course(losses, batches.state_dict()),
            team.agree(None),
            None,
            lambda: None,
            float("inf"),
        )
    except (DivergenceError, hfreduce.PeerError):
        return  # rank 0 says so
    team.leave()


class _Clock:
    """The time between a process's last gradient and the average of all, on the device's clock."""

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = [None, None]

    def start(self) -> None:
        """The process has the gradients of a bucket: the last call of a step counts."""
        self._marks[0] = self._now()

    def end(self) -> None:
        """All are averaged."""
        self._marks[1] = self._now()

    def seconds(self) -> float:
        """Return the time of the last step, which has ended."""
        first, last = self._marks
        if self._cuda:
            last.synchronize()
            return float(first.elapsed_time(last)) / 1e3
        return float(last - first)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event: Any = torch.cuda.Event
        mark = event(enable_timing=True)
        mark.record()
        return mark


class _Timed:
    """The hook's state: hfreduce's, and a clock."""

    def __init__(self, clock: _Clock) -> None:
        self.clock, self.state = clock, hfreduce.HookState()


# torch compares a hook's annotations as types, and here they are texts: it takes one without.
def _timed(state, bucket):  # type: ignore[no-untyped-def]
    state.clock.start()
    return hfreduce.average(state.state, bucket)
