"""A directory of checkpoints: when to save, which to keep, which to go on from.

    manager = CheckpointManager("runs/a", every=1000, keep=3)
    start = manager.resume(model, optimizer)
    for step in range(start.step if start else 0, steps):
        ...
        if manager.should_save(step + 1):
            manager.save(step + 1, model, optimizer)
    manager.close()

A checkpoint's name has its step: step-00001200. Every call is made by all ranks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import distributed as dist

from hfai.checkpoint import api, state
from hfai.checkpoint.errors import StateMismatchError
from hfai.checkpoint.handle import SaveHandle
from hfai.checkpoint.loading import Loaded
from hfai.checkpoint.peers import TIMEOUT, Peers
from hfai.checkpoint.preparing import prepare_pool
from hfai.checkpoint.resuming import Resumption
from hfai.checkpoint.retention import step_name, steps_of, to_remove
from hfai.checkpoint.saver import Saver
from hfai.checkpoint.schedule import Schedule, Watch
from hfai.checkpoint.staging import HOST_BUDGET, HostPool
from hfai.checkpoint.storage import PathLike, locate

if TYPE_CHECKING:
    from typing_extensions import Self

    from ffrecord import StoreOptions


class CheckpointManager:
    """Saves of one training, in one directory.

    Args:
        directory: A path or URL; it is made by the first save.
        every: Steps between two saves; None: `minutes` alone, or only when `save` is called.
        minutes: Minutes between two saves; rank 0's clock counts.
        keep: How many checkpoints stay; older ones are removed when a new one is there. None: all.
        keep_every: Checkpoints of steps that this divides are never removed.
        asynchronous: Save while training goes on.
        busy: What a save does while another one is being written: "wait" for it, or "skip".
        host_budget: Bytes of staging buffers in each rank, for asynchronous saves.
        group: Whose ranks save; None: the default group.
        threads: That hash and move data, in each rank; None: up to 4.
        storage: For object stores.
        timeout: Seconds that a rank waits for the others.

    Raises:
        ValueError: An argument makes no sense.
    """

    def __init__(
        self,
        directory: PathLike,
        *,
        every: int | None = None,
        minutes: float | None = None,
        keep: int | None = 3,
        keep_every: int | None = None,
        asynchronous: bool = True,
        busy: str = "wait",
        host_budget: int = HOST_BUDGET,
        group: dist.ProcessGroup | None = None,
        threads: int | None = None,
        storage: StoreOptions | None = None,
        timeout: float = TIMEOUT,
    ) -> None:
        for name, value in (("every", every), ("keep", keep), ("keep_every", keep_every)):
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"{name} is {value!r}: give a whole number, 1 or more, or None")
        if busy not in ("wait", "skip"):
            raise ValueError(f"busy is {busy!r}: give 'wait' or 'skip'")
        self._location = locate(directory, storage)
        self._keep, self._keep_every = keep, keep_every
        self._asynchronous, self._busy = asynchronous, busy
        self._threads = threads or api.default_threads()
        self._peers = Peers(group, timeout)
        self._saver = Saver(self._peers, self._threads)
        self._schedule = Schedule(self._peers, every, minutes)
        self._watch = Watch(self._peers)
        self._pool = HostPool(host_budget)
        self._handle: SaveHandle | None = None
        self._last: int | None = None
        self._resumes = 0
        self._closed = False

    @property
    def directory(self) -> str:
        """Where the checkpoints are."""
        return self._location.path

    def prepare(self, model: Any, optimizer: Any = None) -> None:
        """Begin to make the buffers of asynchronous saves, so that the first one need not.

        `resume` does so where saves come by themselves, after `every` steps or `minutes`. See
        `hfai.checkpoint.prepare`; no rank waits for another here.

        Args:
            model: As for `save`.
            optimizer: As for `save`.

        Raises:
            StateMismatchError: As for `save`.
            TypeError: As for `save`.
            ValueError: The manager is closed.
        """
        self._need_open()
        prepare_pool(self._pool, model, optimizer, self._peers.world)

    def should_save(self, step: int) -> bool:
        """Whether a checkpoint of this step is due; called at every step boundary, by all ranks.

        Raises:
            CheckpointError: The save before failed; on all ranks at the same boundary.
        """
        self._raise_failure()
        return self._schedule.is_due(step) and step != self._last

    def save(
        self,
        step: int,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        others: Mapping[str, Any] | None = None,
        *,
        scaler: Any = None,
        epoch: int | None = None,
        per_rank: Mapping[str, Any] | None = None,
        rng: bool = True,
        asynchronous: bool | None = None,
    ) -> SaveHandle | None:
        """Save a step.

        Arguments beyond these are as for `hfai.checkpoint.save`.

        Args:
            step: Of the training: that many steps are done.
            model: …
            optimizer: …
            scheduler: …
            others: …
            scaler: …
            epoch: …
            per_rank: …
            rng: …
            asynchronous: In place of the manager's own choice.

        Returns:
            The handle of a save that goes on; None where it is done, or was skipped because another
            one is being written.

        Raises:
            CheckpointError: This save, or the one before, failed on some rank. Of several ranks, an
                asynchronous one that cannot begin is raised again at the next boundary, since
                others may learn of it only there.
            ValueError: The step is no whole number from 0 on, or the manager is closed.
        """
        self._need_open()
        if self._handle is not None and not self._make_room():
            return None
        in_background = self._asynchronous if asynchronous is None else asynchronous
        with self._watching_failure(in_background), self._saver.failing_together():
            if type(step) is not int or step < 0:
                raise ValueError(
                    f"step is {step!r}: give the number of steps done, an int from 0 on"
                )
            if self._peers.rank == 0:
                self._location.sweep()

        def take() -> state.Captured:
            return state.capture(
                model, optimizer, scheduler, scaler, others, per_rank, rng, self._peers.rank
            )

        location = self._location.child(step_name(step))
        self._saver.after_commit = lambda: self._prune(step)
        if in_background:
            with self._watching_failure(in_background):
                handle = api.begin(self._saver, location, take, step, epoch, self._pool, optimizer)
            self._handle = handle
            self._watch.begin(handle)
        else:
            self._saver.save(location, take, step, epoch)
        self._last = step
        self._schedule.saved(step)
        return self._handle if in_background else None

    def wait(self) -> None:
        """Wait for the save that is being written.

        Raises:
            CheckpointError: It failed, on this rank or another.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            self._watch.end()
            handle.wait()

    def latest(self) -> str | None:
        """Return the path of the newest checkpoint; None where there is none."""
        steps = self.steps()
        return self._location.child(step_name(steps[-1])).path if steps else None

    def steps(self) -> list[int]:
        """Return the steps that there are checkpoints of, in order."""
        return steps_of(self._location.children())

    def resume(
        self,
        model: Any,
        optimizer: Any = None,
        scheduler: Any = None,
        *,
        scaler: Any = None,
        strict: bool = True,
        cast: bool = False,
        rng: bool = True,
        fallback: bool = True,
        step: int | None = None,
        progress: Callable[[int], object] | None = None,
    ) -> Loaded | None:
        """Load the newest checkpoint that is whole; all ranks load the same.

        A damaged one is left out with a warning that says which file and which tensor, and so is
        a newer one whose commit record is missing. Only damage counts: an error that may be gone at
        the next try (permissions, too many open files, a store that does not answer) is raised.
        With `strict=False` and earlier checkpoints there, all that is to be loaded is read and
        compared once before, so that tensors which an earlier one does not have keep their values.

        Args:
            model: As for `hfai.checkpoint.load_into`, and so are the next seven.
            optimizer: …
            scheduler: …
            scaler: …
            strict: …
            cast: …
            rng: Restore the random number generators too.
            fallback: Go on to earlier checkpoints; False: raise.
            step: Of the checkpoint; None: the newest.
            progress: …

        Returns:
            What was loaded; None where there is no checkpoint.

        Raises:
            DamagedCheckpointError: There are checkpoints, and all are damaged.
            StateMismatchError: Names, shapes or types differ.
            NoCheckpointError: There is none of this step.
            CheckpointError: Another rank could not load.
            OSError: A file cannot be read, and may be whole.
        """
        given: dict[str, Any] = {
            "model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler,
            "strict": strict, "cast": cast, "rng": rng, "threads": self._threads,
            "rank": self._peers.rank,
        }  # fmt: skip
        self._resumes += 1
        resumption = Resumption(self._location, self._peers, f"resume/{self._resumes}")
        loaded = resumption.run(step, fallback, progress, given)
        if loaded is not None:
            self._last = resumption.step
            self._schedule.saved(resumption.step)
        if self._asynchronous and self._schedule.is_automatic and not self._closed:
            # What makes no sense is for the first save to say.
            with contextlib.suppress(TypeError, ValueError, StateMismatchError):
                self.prepare(model, optimizer)
        return loaded

    def close(self) -> None:
        """Wait for what is being written, and free the buffers.

        Raises:
            CheckpointError: It failed, on this rank or another.
        """
        self._closed = True
        try:
            self.wait()
        finally:
            self._pool.trim()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.close()
        except Exception as error:
            if kind is None:
                raise
            warnings.warn(f"the last checkpoint was not written: {error}", stacklevel=2)

    @contextlib.contextmanager
    def _watching_failure(self, in_background: bool) -> Iterator[None]:
        """Keep an error of this rank alone as a save that has failed: others have begun it."""
        try:
            yield
        except Exception as error:
            if in_background and self._peers.world > 1:
                self._handle = SaveHandle(self._location.path)
                self._handle._end(error)
                self._watch.begin(self._handle)
            raise

    def _need_open(self) -> None:
        if self._closed:
            raise ValueError("the manager is closed: make a new one")

    def _make_room(self) -> bool:
        """Wait for the save before, or say that this one is skipped; all ranks do the same."""
        if self._busy == "skip" and not self._watch.has_ended():
            return False
        self.wait()
        return True

    def _raise_failure(self) -> None:
        if self._handle is not None and self._watch.has_ended():
            self.wait()

    def _prune(self, newest: int) -> None:
        """Remove what is not kept; rank 0 does, behind a commit."""
        if self._keep is None:
            return
        names = self._location.children()
        for name in to_remove(names, self._keep, self._keep_every, newest):
            self._location.child(name).remove()
