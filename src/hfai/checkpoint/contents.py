"""What a checkpoint says of itself: commit record, indexes, values. It needs no torch.

Everything read here is compared with its hash in the commit record, which has its own. Indexes are
read when they are needed, those of the asked rank first.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from hfai.checkpoint.errors import (
    CheckpointError,
    DamagedCheckpointError,
    NoCheckpointError,
    RemovedCheckpointError,
    is_damage,
    nested_too_deeply,
)
from hfai.checkpoint.format import (
    COMMIT,
    FORMAT,
    STATE,
    Commit,
    Index,
    Slice,
    decode_commit,
    decode_index,
    digest,
    index_name,
)
from hfai.checkpoint.storage import File, Location, PathLike, locate

if TYPE_CHECKING:
    from typing_extensions import Self

    from ffrecord import StoreOptions

Found = TypeVar("Found")
_MOST_READS = 20  # of a checkpoint that is replaced each time


class CheckpointFiles:
    """A checkpoint that is open for reading.

    Args:
        path: Its directory or URL.
        storage: For object stores.
        verify: Compare hashes; False reads files whose hashes do not match, where they can be read
            at all.

    Attributes:
        commit: Its commit record.

    Raises:
        NoCheckpointError: There is none, or one that was never finished.
        DamagedCheckpointError: The commit record is damaged.
        CheckpointError: It is of a newer version.
    """

    def __init__(
        self,
        path: PathLike | Location,
        storage: StoreOptions | None = None,
        verify: bool = True,
    ) -> None:
        self.location = path if isinstance(path, Location) else locate(path, storage)
        self.verify = verify
        try:
            record = _commit_record(self.location)
        except OSError as error:
            _raise_as_damage(error, self.path_of(COMMIT))
        self.commit: Commit = decode_commit(record, self.path_of(COMMIT))
        self._indexes: dict[int, Index] = {}
        self._files: dict[str, File] = {}
        self._lock = threading.Lock()
        self._state: dict[str, Any] | None = None

    @property
    def path(self) -> str:
        """The directory or URL."""
        return self.location.path

    def path_of(self, name: str) -> str:
        """Return a file's path, for messages."""
        return f"{self.path}/{name}"

    def index(self, rank: int) -> Index:
        """Return what a rank has written.

        Raises:
            DamagedCheckpointError: The index is damaged, missing, or of another save.
        """
        if rank not in self._indexes:
            name = self.commit.prefix + index_name(rank)
            index = decode_index(self._read_whole(name), self.path_of(name))
            if index.generation != self.commit.generation or index.rank != rank:
                raise DamagedCheckpointError(
                    f"{self.path_of(name)} is of another save ({index.generation}, rank "
                    f"{index.rank}): the directory was mixed from several",
                    path=self.path_of(name),
                )
            self._indexes[rank] = index
        return self._indexes[rank]

    def indexes(self, first: int = 0) -> Iterator[Index]:
        """Yield all indexes, that of rank `first` first."""
        world = self.commit.world
        for rank in range(world):
            yield self.index((first + rank) % world)

    def state(self) -> dict[str, Any]:
        """Return the content of state.json.

        "values", and whether they are "complete", or more is in the indexes; of all tensors but
        those of one rank alone type and shape in "tensors", and of rank 0's other names for the
        same tensor in "aliases".
        """
        if self._state is None:
            name = self.commit.prefix + STATE
            data, path = self._read_whole(name), self.path_of(name)
            try:
                state = json.loads(data)
                if state["format"] != FORMAT or state["generation"] != self.commit.generation:
                    raise ValueError("it is of another save")
                self._state = {
                    name: state[name] for name in ("complete", "values", "tensors", "aliases")
                }
            except RecursionError as error:
                raise nested_too_deeply(path) from error
            except (KeyError, TypeError, ValueError) as error:
                raise DamagedCheckpointError(f"{path}: {error}", path=path) from error
        return self._state

    def slices(self) -> dict[str, list[tuple[Index, Slice]]]:
        """Return all tensors: name -> where its slices are."""
        found: dict[str, list[tuple[Index, Slice]]] = {}
        for index in self.indexes():
            for piece in index.slices:
                found.setdefault(piece.name, []).append((index, piece))
        return found

    def aliases(self, rank: int | None = None) -> dict[str, str]:
        """Return further names of tensors.

        Args:
            rank: Whose own tensors are among them; None: those of all ranks, which takes all
                indexes.
        """
        state = self.state()
        found: dict[str, str] = dict(state["aliases"])
        if rank is None or not state["complete"]:
            ranks = range(self.commit.world)
        else:
            ranks = range(rank, min(rank + 1, self.commit.world))
        for index in map(self.index, ranks):
            found.update(index.aliases)
        return found

    def file(self, index: Index) -> File:
        """Open a shard file, once; its size and its header are compared.

        Raises:
            DamagedCheckpointError: It is missing, of another size, or its header is damaged.
        """
        with self._lock:
            if index.file not in self._files:
                self._files[index.file] = self._open(index)
            return self._files[index.file]

    def _open(self, index: Index) -> File:
        path = self.path_of(index.file)
        try:
            file = self.location.open(index.file)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path} is missing", path=path) from None
        except OSError as error:
            _raise_as_damage(error, path)
        try:
            if file.size != index.size:
                raise DamagedCheckpointError(
                    f"{path} has {file.size} bytes, and {index.size} were written: it was cut "
                    "short or changed",
                    path=path,
                )
            header = bytearray(index.header)
            file.read_into(0, [memoryview(header)])
            if self.verify and digest(header) != index.header_hash:
                raise DamagedCheckpointError(
                    f"{path}: its header (bytes 0 to {index.header}) is damaged",
                    path=path,
                    offset=0,
                )
        except (EOFError, OSError) as error:
            file.close()
            _raise_as_damage(error, path)
        except BaseException:
            file.close()
            raise
        return file

    def _read_whole(self, name: str) -> bytes:
        path = self.path_of(name)
        entry = self.commit.files.get(name)
        if entry is None:
            raise DamagedCheckpointError(f"{path} is not in the commit record", path=path)
        try:
            data = self.location.read(name)
        except FileNotFoundError:
            raise DamagedCheckpointError(f"{path} is missing", path=path) from None
        except OSError as error:
            _raise_as_damage(error, path)
        if self.verify and (len(data) != entry[0] or digest(data) != entry[1]):
            raise DamagedCheckpointError(f"{path} is damaged: its hash does not match", path=path)
        return data

    def was_replaced(self) -> bool:
        """Whether another checkpoint has the name by now."""
        try:
            record = decode_commit(_commit_record(self.location), self.path_of(COMMIT))
        except (CheckpointError, OSError):
            return False
        return record.generation != self.commit.generation

    def was_removed(self) -> bool:
        """Whether there is no checkpoint of the name any more."""
        try:
            return not self.location.is_committed()
        except (CheckpointError, OSError):
            return False

    def close(self) -> None:
        """Close all files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _raise_as_damage(error: Exception, path: str) -> NoReturn:
    """Raise an error of reading: as damage where it says that, else as it is."""
    if isinstance(error, CheckpointError) or not is_damage(error):
        raise error
    raise DamagedCheckpointError(f"{path} cannot be read: {error}", path=path) from error


def read_unreplaced(
    path: PathLike | Location,
    storage: StoreOptions | None,
    verify: bool,
    work: Callable[[CheckpointFiles], Found],
) -> Found:
    """Open a checkpoint and read from it; again, if a save replaces it meanwhile.

    The files of the one that is replaced are removed, which looks like damage; and without hashes
    those of both could be read as one.

    Args:
        path: Its directory or URL.
        storage: For object stores.
        verify: Compare hashes.
        work: What is done with it, perhaps several times.

    Raises:
        RemovedCheckpointError: It was removed meanwhile.
    """
    for _ in range(_MOST_READS - 1):
        with CheckpointFiles(path, storage, verify) as files:
            try:
                found = work(files)
            except (CheckpointError, LookupError, OSError) as error:
                if files.was_replaced():
                    continue
                if files.was_removed():
                    raise RemovedCheckpointError(
                        f"{files.path} was removed while it was read"
                    ) from error
                raise
            if verify or not files.was_replaced():
                return found
    with CheckpointFiles(path, storage, verify) as files:
        return work(files)


def _commit_record(location: Location) -> bytes:
    for _ in range(_MOST_READS):
        try:
            return location.read(COMMIT)
        except (FileNotFoundError, NotADirectoryError):
            if not location.is_committed():
                break  # else it was replaced while it was opened
    raise _no_checkpoint(location)


def _no_checkpoint(location: Location) -> CheckpointError:
    found = location.files() if _is_there(location) else {}
    if not found:
        return NoCheckpointError(f"no checkpoint at {location.path}")
    if location.children():
        return NoCheckpointError(
            f"{location.path} is a directory of checkpoints: name one in it, such as "
            f"{location.children()[-1]}"
        )
    return NoCheckpointError(
        f"{location.path} has no {COMMIT} file: it is no checkpoint, or one that was never "
        "finished (torch.save files and DCP directories: hfai checkpoint convert)"
    )


def _is_there(location: Location) -> bool:
    try:
        location.files()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True
