"""One save after another of the same training, by all of its ranks.

    each rank: state -> parts -> what it writes (plan) -> its shard file, flushed -> its index
    rank 0:    when every rank has said so: state.json, COMMIT, one rename
    each rank: learns from rank 0 whether the checkpoint is there

Ranks tell each other through keys of the group's store (see peers.py):

    token            rank 0's, once: what the generations of these saves begin with
    N/names/RANK     of save N, and N/list/RANK: see meeting.py
    N/done/RANK      what it was called for, sizes and a hash of its files; or its error
    N/slices/RANK    the boxes it writes, where they are not those of the save before
    N/outcome        rank 0's: "" or the error
    ended            rank 0's: which save failed last; see calls.py
"""

from __future__ import annotations

import contextlib
import json
import secrets
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from typing import Any, NamedTuple

import torch
from torch import Tensor

import hfai
from hfai.checkpoint import coverage, running, shard, unheard, write
from hfai.checkpoint.calls import FAILED, Call, Numbers, call_of, need_same
from hfai.checkpoint.errors import CheckpointError
from hfai.checkpoint.format import (
    FORMAT,
    STATE,
    VERSION,
    Commit,
    Index,
    Layout,
    digest,
    index_name,
    lay_out,
    shard_name,
)
from hfai.checkpoint.handle import SaveHandle
from hfai.checkpoint.meeting import Meeting, raise_error
from hfai.checkpoint.parts import Part, find_aliases, need_stored, part_of
from hfai.checkpoint.peers import Peers
from hfai.checkpoint.plan import Planned
from hfai.checkpoint.staging import HostPool
from hfai.checkpoint.state import Captured
from hfai.checkpoint.storage import Location, Writer
from hfai.checkpoint.unheard import AGAIN

# Gives the state that is to be saved.
Take = Callable[[], Captured]


class Prepared(NamedTuple):
    """All that a rank needs to write its part of a checkpoint."""

    number: int
    rank: int
    generation: str
    writer: Writer
    location: Location
    layout: Layout
    contents: shard.Contents
    captured: Captured
    aliases: Mapping[str, str]
    alike: bool
    step: int | None
    epoch: int | None
    call: Call
    changed: bool


class Saver:
    """Saves of one training.

    All ranks of the group must make it, and save, in the same order.

    Args:
        peers: The ranks.
        threads: That hash and write, in each rank.

    Attributes:
        after_commit: Called on rank 0 when a checkpoint is there.
    """

    def __init__(self, peers: Peers, threads: int) -> None:
        if threads < 1:
            raise ValueError(f"threads is {threads}: give 1 or more")
        self.peers, self.threads = peers, threads
        self._numbers = Numbers(peers)
        self._token = ""
        self._meeting = Meeting(peers)
        self._running: SaveHandle | None = None
        self._turn = threading.RLock()  # of threads that save
        self.after_commit: Callable[[], None] = lambda: None

    def save(self, location: Location, take: Take, step: int | None, epoch: int | None) -> None:
        """Write a checkpoint; return when it is there.

        Args:
            location: Where.
            take: Gives the state; if it raises, the save fails on all ranks.
            step: Of the training.
            epoch: Of the training.

        Raises:
            CheckpointError: It could not be written, on this rank or another.
        """
        with self._turn:
            prepared = self._prepare(location, take, step, epoch)
            self._complete(prepared, lambda: write.directly(prepared, self.threads))

    def save_async(
        self,
        location: Location,
        take: Take,
        step: int | None,
        epoch: int | None,
        pool: HostPool,
    ) -> SaveHandle:
        """Begin to write a checkpoint; return the handle, perhaps before the state is copied."""
        with self._turn:
            return self._begin(self._prepare(location, take, step, epoch), pool)

    def _begin(self, prepared: Prepared, pool: HostPool) -> SaveHandle:
        unheard.watch_exit()
        handle = SaveHandle(prepared.location.path)
        staging = write.Staging(prepared, self.threads, pool, handle)

        held = self.peers.hold()
        place = running.place_of(prepared.location)

        def run() -> None:
            nonlocal held
            error: BaseException | None = None
            try:
                self._complete(prepared, staging.run)
            except BaseException as caught:
                error = caught
            held = None
            handle._end(error)
            running.end(place, handle)

        self._running = handle
        running.begin(place, handle)
        # No daemon: a script that ends waits for it.
        handle._thread = threading.Thread(target=run, name="hfai-checkpoint")
        handle._thread.start()
        return handle

    def _prepare(
        self, location: Location, take: Take, step: int | None, epoch: int | None
    ) -> Prepared:
        """Decide what this rank writes, when a save that is running has ended."""
        # Another saver's, such as a manager's: whoever was called last must be what stays.
        running.wait(running.place_of(location))
        call = call_of(location, step, epoch)
        failed = self._end_running()
        self._numbers.need_reached(call)
        number, refused = self._numbers.next(call)
        try:
            generation = f"{self._agree_on_token()}{number:06x}"
            if failed is not None:
                raise CheckpointError(f"the save before {AGAIN}: {failed}") from failed
            if refused:
                raise CheckpointError(refused)
            for name, value in (("step", step), ("epoch", epoch)):
                if value is not None and type(value) is not int:
                    raise TypeError(f"{name} is {value!r}: give an int, or None")
            captured = take()
            for name, tensor in captured.tensors.items():
                need_stored(name, tensor)
            aliases = find_aliases(captured.tensors)
            names = [name for name in captured.tensors if name not in aliases]
            parts = [part_of(name, captured.tensors[name]) for name in names]
            held = [part for part in parts if part is not None]
            planned = self._meeting.plan(number, held, captured.primary)
            layout = lay_out((p.slice for p in planned), generation, self.peers.rank)
            contents = shard.Contents(layout, _in_order(layout, planned, held))
            writer = location.writer(generation)
        except BaseException as error:
            self._report_failure(number, call, error)
            raise
        return Prepared(
            number, self.peers.rank, generation, writer, location, layout, contents, captured,
            aliases, self._meeting.alike, step, epoch, call, self._meeting.changed,
        )  # fmt: skip

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """Count what is refused in this block as a save, which the other ranks are in.

        Else this rank would be one save behind them for good.
        """
        try:
            yield
        except Exception as error:
            self._end_running()
            number, _ = self._numbers.next(None)
            if self.peers.rank == 0:
                self._agree_on_token()
            self._report_failure(number, None, error)
            raise

    def _end_running(self) -> BaseException | None:
        """Wait for the save that is running; return why it failed, if nobody has asked."""
        handle, self._running = self._running, None
        if handle is None:
            return None
        handle._done.wait()
        handle._unguard()
        return handle._error if unheard.forget(handle) else None

    def _agree_on_token(self) -> str:
        if not self._token:
            if self.peers.rank == 0:
                self._token = secrets.token_hex(5)
                self.peers.set("token", self._token.encode())
            else:
                self._token = self.peers.wait(["token"], "the first save")[0].decode()
        return self._token

    def _complete(self, prepared: Prepared, write_shard: Any) -> None:
        """Write this rank's files, and let rank 0 commit; the same outcome on all ranks."""
        peers, number = self.peers, prepared.number
        try:
            try:
                write_shard()
                report = self._write_index(prepared)
                report["call"], report["path"] = prepared.call, prepared.location.path
                report["told"] = prepared.changed
                if prepared.changed:
                    coverage.tell(peers, number, prepared.layout.slices)
                peers.set(f"{number}/done/{peers.rank}", json.dumps(report).encode())
                if peers.rank == 0:
                    self._commit(prepared)
                    peers.set(f"{number}/outcome", b"")
                else:
                    outcome = peers.wait([f"{number}/outcome"], f"commit {prepared.location.path}")
                    if outcome[0]:
                        raise CheckpointError(outcome[0].decode())
            except BaseException as error:
                self._report_failure(number, prepared.call, error)
                told = self._told(number, prepared.location.path, error)
                prepared.writer.abort()
                if told:
                    raise CheckpointError(told) from error
                raise
            prepared.writer.leave()
        finally:
            self._forget(number)

    def _write_index(self, prepared: Prepared) -> dict[str, Any]:
        rank, layout = self.peers.rank, prepared.layout
        own: dict[str, Any] = dict(prepared.captured.own)
        if not prepared.alike:
            own["values"] = prepared.captured.values
        name_of = prepared.location.name_of
        file = name_of(shard_name(rank), prepared.generation) if layout.slices else ""
        index = Index(
            prepared.generation,
            rank,
            file,
            layout.size if file else 0,
            len(layout.header) if file else 0,
            digest(layout.header) if file else "",
            prepared.contents.slices(),
            prepared.aliases,
            own,
        )
        data = index.encode()
        prepared.writer.put(name_of(index_name(rank), prepared.generation), data)
        return {"shard": index.size, "index": [len(data), digest(data)]}

    def _commit(self, prepared: Prepared) -> None:
        """Wait for all ranks, then make the checkpoint appear."""
        peers, generation, writer = self.peers, prepared.generation, prepared.writer
        keys = [f"{prepared.number}/done/{rank}" for rank in range(peers.world)]
        reports = [json.loads(text) for text in peers.wait(keys, "finish the save", raise_error)]
        paths = [report["path"] for report in reports]
        need_same([report["call"] for report in reports], paths)
        if all(report["told"] for report in reports):  # else some know it from the save before
            coverage.need_whole(peers, prepared.number, self._meeting.known)

        def name_of(name: str) -> str:
            return prepared.location.name_of(name, generation)

        state = {
            "format": FORMAT,
            "version": VERSION,
            "generation": generation,
            "complete": prepared.alike,
            "tensors": self._meeting.known,
            "aliases": dict(prepared.aliases),
            "values": prepared.captured.values,
        }
        data = json.dumps(state, separators=(",", ":"), allow_nan=False).encode()
        writer.put(name_of(STATE), data)
        files: dict[str, tuple[int, str]] = {name_of(STATE): (len(data), digest(data))}
        for rank, report in enumerate(reports):
            size, found = report["index"]
            files[name_of(index_name(rank))] = (size, found)
            if report["shard"]:
                files[name_of(shard_name(rank))] = (report["shard"], "")
        for name, (size, _) in files.items():
            _need_size(writer, name, size, paths)
        record = Commit(
            generation,
            peers.world,
            files,
            datetime.now(timezone.utc).isoformat(timespec="seconds"),
            prepared.step,
            prepared.epoch,
            {"hfai": hfai.__version__, "torch": str(torch.__version__)},
        )
        writer.commit(record.encode())
        try:
            self.after_commit()
        except OSError as error:
            warnings.warn(f"older checkpoints could not be removed: {error}", stacklevel=2)

    def _told(self, number: int, path: str, error: BaseException) -> str:
        """Wait until rank 0 knows of a failure, before its files are taken away under its hands.

        Returns:
            The failure, where it was another rank's: this one's may only be what came of it.
        """
        if self.peers.rank == 0 or not isinstance(error, Exception):
            return ""
        if isinstance(error, CheckpointError):  # it has waited already
            return ""
        try:
            outcome = self.peers.wait([f"{number}/outcome"], f"commit {path}")[0].decode()
        except CheckpointError:
            return ""
        return "" if outcome.startswith(f"{FAILED}rank {self.peers.rank}:") else outcome

    def _report_failure(self, number: int, call: Call | None, error: BaseException) -> None:
        """Tell the other ranks, as far as that can still be done."""
        text = f"{FAILED}rank {self.peers.rank}: {type(error).__name__}: {error}"
        if str(error).startswith(FAILED):
            text = str(error)
        try:
            self._meeting.forget()
            self._numbers.failed(number, call, text, error)
            if self.peers.world > 1:
                said = f"{number}/names/{self.peers.rank}"
                if not self.peers.has(said):
                    self.peers.set(said, b"failed")
                self.peers.set(
                    f"{number}/done/{self.peers.rank}", json.dumps({"error": text}).encode()
                )
            if self.peers.rank == 0:
                self.peers.set(f"{number}/outcome", text.encode())
        except CheckpointError:
            pass  # the others will run into their timeout

    def _forget(self, number: int) -> None:
        """Remove this rank's keys of the save before: by now everyone has read them."""
        for key in ("names", "list", "slices", "done"):
            self.peers.forget(f"{number - 1}/{key}/{self.peers.rank}")
        if self.peers.rank == 0:
            self.peers.forget(f"{number - 1}/outcome")


def _in_order(layout: Layout, planned: Sequence[Planned], parts: Sequence[Part]) -> list[Tensor]:
    """Return the values of a layout's slices."""
    found = {(p.slice.name, p.slice.offsets): shard.local_of(p, parts) for p in planned}
    return [found[piece.name, piece.offsets] for piece in layout.slices]


def _need_size(writer: Writer, name: str, size: int, paths: Sequence[str]) -> None:
    try:
        found = writer.size(name)
    except OSError as error:
        differ = [f"rank {at} to {path}" for at, path in enumerate(paths) if path != paths[0]]
        where = f" (rank 0 writes to {paths[0]}, {differ[0]})" if differ else ""
        raise CheckpointError(
            f"rank 0 does not see {name} ({error.strerror or error}): all ranks must write to one "
            f"file system{where}"
        ) from None
    if found != size:
        raise CheckpointError(f"{name} has {found} bytes, and {size} were written to it")
