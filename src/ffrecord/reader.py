"""Reads records by index from one file or from many that stand for one set.

A batch is one straight line: indices → parts → places in their files → one call of the engine,
which sorts, merges, reads and checks → arrays. Nothing is opened, mapped or started before it is
needed; a reader holds names, headers and at most its tables, so it works on in a forked child and
is pickled by name, with what tells that the files are still the same.
"""

from __future__ import annotations

import operator
import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, cast, overload

import numpy as np
from numpy.typing import NDArray

from ffrecord import engines
from ffrecord.damage import damaged_in
from ffrecord.descriptors import SourceFile
from ffrecord.engine import RequestError, Requests, ShortReadError
from ffrecord.errors import DamagedFileError, RecordError
from ffrecord.fileset import FileSet
from ffrecord.part import Part, Places
from ffrecord.paths import PathLike, expand
from ffrecord.store_options import StoreOptions
from ffrecord.writer import BufferLike

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

Indices = Sequence[int] | NDArray[np.integer[Any]] | slice
Record = NDArray[np.uint8]

# Records start at multiples of this in an arena (a cache line; any dtype may be viewed in place).
_ALIGNMENT = 64
# Sets whose tables take more memory than this look entries up in the files.
_MOST_TABLES = 64 << 20
_TABLES = {"auto": None, "memory": True, "demand": False}


class FileReader:
    """A reader of record files.

    Args:
        fname: A file, a list of files, or a directory, which stands for its `*.ffr` files sorted as
            strings. Indices run through the files in order. Also URLs of objects and directories in
            a store, such as "s3://bucket/train.ffr" (needs `hfai[storage]`).
        check_data: Compare checksums: the header's here, and each record's when it is read. Headers
            that make no sense are refused either way.
        tables: "memory" keeps the files' tables (12 bytes a record) once a file was read, "demand"
            looks entries up in the file, "auto" chooses the latter for more than 64 MiB of them in
            local files.
        engine: How batches are read, see `ffrecord.explain`: "auto", "direct", "io_uring",
            "libaio", "threads" or "python"; objects of stores have one of their own.
        storage: How objects of stores are read.

    Attributes:
        n: The number of records.
        fnames: The files.
        check_data: As given.

    Raises:
        FileNotFoundError: A file does not exist, or a directory has none.
        ValueError: A name does not end with `.ffr`.
        HeaderError: A file is damaged, cut short, or no record file.
        OSError: A file cannot be read, or a store does not answer (TimeoutError) or refuses.
    """

    def __init__(
        self,
        fname: PathLike | Iterable[PathLike],
        check_data: bool = True,
        *,
        tables: Literal["auto", "memory", "demand"] = "auto",
        engine: str = "auto",
        storage: StoreOptions | None = None,
    ) -> None:
        self._set: FileSet | None = None
        if tables not in _TABLES:
            raise ValueError(f'tables is {tables!r}: give "auto", "memory" or "demand"')
        if not isinstance(storage, (StoreOptions, type(None))):
            raise TypeError(f"storage is {storage!r}: give a ffrecord.StoreOptions")
        self._storage = storage or StoreOptions()
        self.fnames = expand(fname, self._storage)
        self.check_data = check_data
        self._tables = tables
        self._set = FileSet(
            self.fnames,
            storage=self._storage,
            check_data=check_data,
            keep_tables=_TABLES[tables],
            most_tables=_MOST_TABLES,
        )
        self.n = self._set.n
        self._engine_name = engine
        if not self._set.is_remote:
            self._engine = engines.choose(engine, sum(part.header.size for part in self._set.parts))
        elif engine == "auto":
            self._engine = engines.for_stores(self._storage)
        else:
            raise ValueError(
                f"engine is {engine!r}: that is for local files, not for objects of a store"
            )

    def read(
        self, indices: Indices, out: BufferLike | None = None, *, writable: bool = True
    ) -> list[Record]:
        """Read a batch.

        The arrays of one call lie in one block of memory, which lives as long as any of them: copy
        the few that shall outlive their batch.

        Args:
            indices: Any integers in [-n, n), in any order, also more than once; or a slice.
            out: Memory to read into (contiguous, writable, `nbytes(indices)` bytes or more), for
                example a pinned tensor's `numpy()`; new memory by default.
            writable: False gives read-only arrays.

        Returns:
            One uint8 array a record, shape (length,), in the order of `indices`.

        Raises:
            IndexError: An index is out of range.
            TypeError: Something is not an integer.
            ValueError: `out` is too small, or the reader is closed.
            RecordError: A record is damaged or cut short.
            OSError: A file cannot be read.
        """
        wanted = self._normalised(indices)
        files = self._open_set()
        owners, places = files.locate(wanted)
        positions, total = _layout(places.lengths)
        arena = self._engine.empty(total) if out is None else _checked_arena(out, total)
        for numbers, members in files.goes(owners):
            with files.keys(numbers) as keys:
                requests = Requests(
                    np.array(keys, np.int64)[np.searchsorted(numbers, owners[members])],
                    places.offsets[members],
                    places.lengths[members],
                    positions[members],
                )
                try:
                    found = self._engine.read_batch(requests, arena, checksums=self.check_data)
                except RequestError as error:
                    raise self._failure(error, wanted[members], places.offsets[members]) from error
            if found is not None and not np.array_equal(found, places.checksums[members]):
                bad = int(np.flatnonzero(found != places.checksums[members])[0])
                at = int(members[bad])
                raise self._damage(int(wanted[at]), places, at, int(found[bad]))
        if not writable:
            arena = arena[:]
            arena.flags.writeable = False
        return [
            arena[position : position + length]
            for position, length in zip(positions.tolist(), places.lengths.tolist(), strict=True)
        ]

    def read_one(self, index: int) -> Record:
        """Read one record as a new uint8 array, shape (length,).

        Raises:
            IndexError: The index is out of range.
            RecordError: The record is damaged or cut short.
            OSError: The file cannot be read.
        """
        index = self._normalised_one(index)
        part, local = self._open_set().find(index)
        if not isinstance(part.file, SourceFile):
            return self.read([index])[0]
        offset, length, expected = part.locate_one(local)
        record = np.empty(length, np.uint8)
        done = 0
        with part.file.access() as descriptor:
            while done < length:
                got = os.preadv(descriptor, [record[done:].data], offset + done)
                if got == 0:
                    raise self._cut_short(index, offset, offset + done)
                done += got
        if self.check_data and (found := zlib.crc32(record.data)) != expected:
            raise self._damaged(index, offset, expected, found)
        return record

    def nbytes(self, indices: Indices) -> int:
        """Return the bytes that `read(indices, out=…)` needs: lengths rounded up to 64 each."""
        plan = self._open_set().locate(self._normalised(indices))
        return _layout(plan.places.lengths)[1]

    def get_offsets(self, file_idx: int) -> NDArray[np.int64]:
        """Return where the records of one file start, and its size as the last item: (n + 1,)."""
        return self._open_set().parts[file_idx].offsets()

    def get_checksums(self, file_idx: int) -> NDArray[np.uint32]:
        """Return the checksums in one file's table, shape (n,)."""
        return self._open_set().parts[file_idx].checksums()

    def get_metadata(self, file_idx: int) -> dict[str, Any] | None:
        """Return what the writer of one file was given as `metadata`, or None."""
        found: dict[str, Any] | None = self._open_set().parts[file_idx].text().get("metadata")
        return found

    def get_schema(self, file_idx: int) -> dict[str, Any] | None:
        """Return what the writer of one file was given as `schema`, or None."""
        found: dict[str, Any] | None = self._open_set().parts[file_idx].text().get("schema")
        return found

    def get_keys(self, file_idx: int) -> list[str]:
        """Return the keys in one file, in the order of their bytes."""
        keys = self._open_set().parts[file_idx].keys()
        return [keys.key(number) for number in range(len(keys))] if keys else []

    def file_of(self, index: int) -> str:
        """Return the name of the file that a record is in.

        Raises:
            IndexError: The index is out of range.
        """
        return self._open_set().find(self._normalised_one(index))[0].path

    def index_of(self, key: str) -> int:
        """Return the index of the record with a key; the first file that has it counts.

        Raises:
            KeyError: No file has it.
        """
        files = self._open_set()
        for part, end in zip(files.parts, files.ends, strict=True):
            keys = part.keys()
            local = keys.find(key) if keys else None
            if local is not None:
                return end - part.header.n + local
        raise KeyError(f"no record with the key {key!r} in {self!r}")

    def validate(self, deep: bool = False) -> None:
        """Check all headers, and with `deep` every record.

        Raises:
            HeaderError: A header is damaged.
            RecordError: A record is damaged; `damaged` finds all of them.
        """
        for part in self._open_set().parts:
            part.recheck()
        if deep:
            for error in self.damaged():
                raise error

    def damaged(self, first: int = 0, last: int | None = None) -> Iterator[RecordError]:
        """Read records `first` to `last` (exclusive), and yield an error for each damaged one.

        A local disk's error (EIO) in a record counts as damage of it.
        """
        checker = self
        if not self.check_data:
            checker = FileReader(self._names(), tables=self._tables, storage=self._storage)
        stop = self.n if last is None else last
        for start, end in self.pieces():
            yield from damaged_in(checker, range(max(start, first), min(end, stop)))

    def pieces(self) -> Iterator[tuple[int, int]]:
        """Yield ranges that cover all records, each a good piece of work (8 MiB or one record)."""
        return self._open_set().pieces()

    def close(self) -> None:
        """Let go of the files; a second call does nothing."""
        files, self._set = self._set, None
        for part in files.parts if files else ():
            part.close()

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> list[Record]: ...
    def __getitem__(self, index: int | slice) -> Record | list[Record]:
        return self.read(index) if isinstance(index, slice) else self.read_one(index)

    def __iter__(self) -> Iterator[Record]:
        for first, last in self.pieces():
            yield from self.read(range(first, last))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "_set", None):
            self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        options = (self.check_data, self._tables, self._engine_name, self._storage)
        if self._set is None:
            return _reopen, (self.fnames, *options)
        return _reopen, (self._names(), *options, [_content(part) for part in self._set.parts])

    def __repr__(self) -> str:
        names = self.fnames[0] if len(self.fnames) == 1 else f"{len(self.fnames)} files"
        return f"FileReader({names}, n={self.n})"

    def _names(self) -> list[str]:
        """Return the files by names that hold in any directory."""
        files = [part.file for part in self._open_set().parts]
        return [file.absolute if isinstance(file, SourceFile) else file.path for file in files]

    def _open_set(self) -> FileSet:
        if self._set is None:
            raise ValueError(f"{self!r} is closed")
        return self._set

    def _normalised_one(self, index: int) -> int:
        position = operator.index(index)
        if not -self.n <= position < self.n:
            raise IndexError(f"record {position} is out of range: there are {self.n}")
        return position % self.n if position < 0 else position

    def _normalised(self, indices: Indices) -> NDArray[np.int64]:
        if isinstance(indices, slice):
            return np.arange(*indices.indices(self.n), dtype=np.int64)
        if isinstance(indices, range):
            wanted = np.arange(indices.start, indices.stop, indices.step)
        else:
            wanted = np.asarray(indices)
        if wanted.ndim != 1:
            raise TypeError("read takes a list of indices; read_one takes a single one")
        if len(wanted) == 0:
            return np.empty(0, np.int64)
        if wanted.dtype.kind not in "iu":
            raise TypeError(f"indices are integers, not {wanted.dtype}")
        outside = (wanted < -self.n) | (wanted >= self.n)
        if outside.any():
            raise IndexError(f"record {wanted[outside][0]} is out of range: there are {self.n}")
        wanted = wanted.astype(np.int64)
        wanted[wanted < 0] += self.n
        return wanted

    def _damage(self, index: int, places: Places, at: int, found: int) -> RecordError:
        return self._damaged(index, int(places.offsets[at]), int(places.checksums[at]), found)

    def _damaged(self, index: int, offset: int, expected: int, found: int) -> RecordError:
        path = self._open_set().find(index)[0].path
        return RecordError(
            f"record {index} is damaged: {path}, byte {offset}: expected checksum "
            f"{expected:#010x}, found {found:#010x}",
            path=path,
            index=index,
            offset=offset,
            expected=expected,
            found=found,
        )

    def _cut_short(self, index: int, offset: int, end: int) -> RecordError:
        path = self._open_set().find(index)[0].path
        return RecordError(
            f"record {index} is cut short: {path}, byte {offset}: the file ends at byte {end} now",
            path=path,
            index=index,
            offset=offset,
        )

    def _failure(
        self, error: RequestError, wanted: NDArray[np.int64], offsets: NDArray[np.int64]
    ) -> Exception:
        """Say in the reader's terms which request of a batch failed."""
        index, offset = int(wanted[error.request]), int(offsets[error.request])
        part = self._open_set().find(index)[0]
        path = part.path
        if isinstance(error, ShortReadError):
            file = part.file
            size = os.stat(file.absolute).st_size if isinstance(file, SourceFile) else file.size
            return self._cut_short(index, offset, size)
        return OSError(error.errno, f"record {index}, byte {offset}: {error.strerror}", path)


def _reopen(
    fnames: list[str],
    check_data: bool,
    tables: Any,
    engine: str,
    storage: StoreOptions,
    contents: list[tuple[int, ...]] | None = None,
) -> FileReader:
    """Open a pickled reader's files.

    Raises:
        DamagedFileError: One has other records than when the reader was pickled.
    """
    reader = FileReader(fnames, check_data, tables=tables, engine=engine, storage=storage)
    for part, content in zip(reader._open_set().parts, contents or (), strict=False):
        if _content(part) != content:
            reader.close()
            raise DamagedFileError(
                f"{part.path} was replaced or written to since the reader that was pickled opened "
                "it: make a new reader",
                path=part.path,
            )
    return reader


def _content(part: Part) -> tuple[int, ...]:
    """Return what tells a file's content on any machine; the checksum covers all records'."""
    return part.header.n, part.header.size, part.header.checksum


def _layout(lengths: NDArray[np.int64]) -> tuple[NDArray[np.int64], int]:
    """Place records one after the other, aligned; return their positions and the bytes in all."""
    room = (lengths + (_ALIGNMENT - 1)) & -_ALIGNMENT
    ends = np.cumsum(room)
    return ends - room, int(ends[-1]) if len(ends) else 0


def _checked_arena(out: BufferLike, total: int) -> NDArray[np.uint8]:
    view = memoryview(cast("Buffer", out))
    if view.readonly or not view.c_contiguous:
        raise ValueError("out must be writable and contiguous")
    if view.nbytes < total:
        raise ValueError(
            f"out has {view.nbytes} bytes, this batch needs {total}: see FileReader.nbytes"
        )
    return np.frombuffer(view, np.uint8) if view.nbytes else np.empty(0, np.uint8)
