"""What a place for checkpoints must be able to do."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

from hfai.checkpoint.format import digest, hash_count, hashes_of


class Run(NamedTuple):
    """Bytes of a file that are read to their place.

    Attributes:
        offset: The first one, in the file.
        view: Their place. It begins with a chunk of what has hashes, and ends with one.
        hashes: Of those chunks, back to back; "": nothing is compared.
    """

    offset: int
    view: memoryview
    hashes: str


class Failure(NamedTuple):
    """Why a run is not there, or not as it was written.

    Attributes:
        run: Which of them.
        chunk: Which chunk of it, where its hash differs.
        found: That hash.
        error: What reading it has raised: EOFError where the file ends before, or OSError.
    """

    run: int
    chunk: int
    found: str
    error: EOFError | OSError | None


class Sink(ABC):
    """A file that is being written."""

    @abstractmethod
    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        """Write at a byte; from several threads at once where the location is not `ordered`.

        Raises:
            OSError: It cannot be written.
        """

    def write_hashed(self, offset: int, views: Sequence[memoryview]) -> list[str]:
        """Write as `write` does, and return each view's hash."""
        hashes = [digest(view) for view in views]
        self.write(offset, views)
        return hashes

    @abstractmethod
    def close(self) -> None:
        """Make what was written last, whatever happens to the machine."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of the file without caring for its content. Raises nothing."""


class File(ABC):
    """A file that is read; from several threads at once.

    Attributes:
        size: Its bytes.
    """

    size: int

    @abstractmethod
    def read_into(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill memory from a byte on.

        Raises:
            EOFError: The file ends before.
            OSError: It cannot be read.
        """

    def read_runs(self, runs: Sequence[Run], chunk: int) -> Failure | None:
        """Fill runs and compare their hashes.

        Args:
            runs: In the order of the file; those that follow each other are read together.
            chunk: Bytes that have a hash of their own.

        Returns:
            The first failure; what comes behind it may not be filled.
        """
        at = 0
        while at < len(runs):
            end = at + 1
            while end < len(runs) and _follows(runs[end - 1], runs[end]):
                end += 1
            try:
                self.read_into(runs[at].offset, [run.view for run in runs[at:end]])
            except (EOFError, OSError) as error:
                return Failure(at, 0, "", error)
            for number in range(at, end):
                run = runs[number]
                for chunk_number in range(hash_count(run.hashes)):
                    found = digest(run.view[chunk_number * chunk : (chunk_number + 1) * chunk])
                    if found != hashes_of(run.hashes, chunk_number, 1):
                        return Failure(number, chunk_number, found, None)
            at = end
        return None

    @abstractmethod
    def close(self) -> None:
        """Let go of it."""


def _follows(one: Run, other: Run) -> bool:
    return one.offset + len(one.view) == other.offset


class Writer(ABC):
    """A checkpoint that one save writes, from one or several processes.

    Each process has its own object of the same generation. Nothing is to be seen under the
    location's name before `commit`.
    """

    @abstractmethod
    def create(self, name: str, size: int, direct: bool = False) -> Sink:
        """Begin a file.

        Args:
            name: Of the file.
            size: Bytes that it will have.
            direct: Write past the page cache what can be: for saves beside a training, which keeps
                its data there and needs the cores. What is loaded next then comes from the disk.
        """

    @abstractmethod
    def put(self, name: str, data: bytes) -> None:
        """Write a small file, to last."""

    @abstractmethod
    def size(self, name: str) -> int:
        """Return the bytes of a file that any of the processes has written.

        Raises:
            OSError: It is not there.
        """

    @abstractmethod
    def commit(self, record: bytes) -> None:
        """Let the checkpoint appear, in one step, in place of what was there before."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what this save has written. Raises nothing."""

    @abstractmethod
    def leave(self) -> None:
        """Let go of what this process holds; another one commits or aborts."""


class Location(ABC):
    """A checkpoint's place, or that of a directory of them.

    Attributes:
        ordered: Whether a sink must be written from its beginning to its end by one thread.
        at_once: Bytes that one thread asks for at a time, more or less.
        path: As it was named.
    """

    ordered: bool = False
    at_once: int = 4 << 20
    path: str

    @abstractmethod
    def writer(self, generation: str) -> Writer:
        """Begin to write a checkpoint here."""

    @abstractmethod
    def name_of(self, name: str, generation: str) -> str:
        """Return what a file of a checkpoint is called here."""

    @abstractmethod
    def read(self, name: str) -> bytes:
        """Return a small file.

        Raises:
            FileNotFoundError: There is none.
            OSError: It cannot be read.
        """

    @abstractmethod
    def open(self, name: str) -> File:
        """Open a file.

        Raises:
            FileNotFoundError: There is none.
            OSError: It cannot be read.
        """

    @abstractmethod
    def is_committed(self) -> bool:
        """Whether a checkpoint is here."""

    @abstractmethod
    def files(self) -> dict[str, int]:
        """Return names and sizes of all files here, committed or not."""

    @abstractmethod
    def children(self) -> list[str]:
        """Return the names of the checkpoints in this directory; empty where there is none."""

    def unfinished(self) -> list[str]:
        """Return the names in this directory that have a checkpoint's files and no commit record.

        Where a save is seen only when it is whole, somebody has taken that record away; other
        stores name none.
        """
        return []

    @abstractmethod
    def child(self, name: str) -> Location:
        """Return a place in this directory."""

    @abstractmethod
    def remove(self) -> None:
        """Remove the checkpoint; if that is interrupted, none is left to be seen.

        Of a symbolic link only the link is removed.
        """

    @abstractmethod
    def sweep(self) -> list[str]:
        """Remove what dead writers left in this directory; return the names."""

    @abstractmethod
    def sweep_beside(self) -> None:
        """Remove what dead writers of this one checkpoint left, where that lies beside it.

        Raises nothing: what cannot be removed stays.
        """
