"""Checkpoints in object stores (through obstore) and in whatever fsspec knows.

Objects cannot be renamed together, so every object but COMMIT has the save's generation in its
name, and the commit object is written last: until then the old one stands, and names the old
objects. Those are removed after it. Two writers at once write different objects, and the last
commit counts.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hfai.checkpoint.format import COMMIT, decode_commit
from hfai.checkpoint.storage.base import File, Location, Sink, Writer

if TYPE_CHECKING:
    from ffrecord import StoreOptions

OBSTORE = ("s3", "s3a", "gs", "az", "azure", "abfs", "abfss", "adl", "http", "https")
_RANGE = 8 << 20  # bytes that are fetched at a time, where more are wanted


class Store:
    """The few things that are asked of a place whose files have names with slashes."""

    def put(self, name: str, data: bytes) -> None:
        """Write an object in one step."""
        raise NotImplementedError

    def get(self, name: str) -> bytes:
        """Return an object."""
        raise NotImplementedError

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of an object."""
        raise NotImplementedError

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        raise NotImplementedError

    def list(self, prefix: str) -> dict[str, int]:
        """Return all objects below a name: the rest of their names, and sizes."""
        raise NotImplementedError

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        raise NotImplementedError

    def open(self, name: str) -> Any:
        """Return a file to write, which appears when it is closed."""
        raise NotImplementedError


def locate(url: str, options: StoreOptions | None) -> Location:
    """Return the place that a URL names.

    Raises:
        ValueError: Its scheme is not known, or it names no bucket.
        ImportError: The library for it is missing.
    """
    scheme, _, rest = url.partition("://")
    root, _, path = rest.strip("/").partition("/")
    if scheme in OBSTORE:
        from hfai.checkpoint.storage.obstore import ObjectStore

        if not root or not path:
            raise ValueError(f"{url} names no place in a bucket: give {scheme}://bucket/path")
        return RemoteLocation(url, path, ObjectStore(f"{scheme}://{root}", options))
    from hfai.checkpoint.storage.fsspec import FileSystem

    return RemoteLocation(url, rest.rstrip("/"), FileSystem(scheme))


class RemoteLocation(Location):
    """A prefix of names.

    Args:
        url: As it was named.
        prefix: What the names of its objects begin with, without the last slash.
        store: That has them.
    """

    ordered = True  # an upload takes its parts in order

    def __init__(self, url: str, prefix: str, store: Store) -> None:
        self.path, self._prefix, self._store = url.rstrip("/"), prefix, store

    def writer(self, generation: str) -> Writer:
        """Begin to write a checkpoint here."""
        return _RemoteWriter(self, self._prefix, self._store, generation)

    def name_of(self, name: str, generation: str) -> str:
        """Return what a file of a checkpoint is called here."""
        return f"{generation}-{name}"

    def read(self, name: str) -> bytes:
        """Return a small file."""
        return self._store.get(f"{self._prefix}/{name}")

    def open(self, name: str) -> File:
        """Open a file."""
        return _RemoteFile(self._store, f"{self._prefix}/{name}")

    def is_committed(self) -> bool:
        """Whether a checkpoint is here."""
        try:
            self._store.size(f"{self._prefix}/{COMMIT}")
        except FileNotFoundError:
            return False
        return True

    def files(self) -> dict[str, int]:
        """Return names and sizes of all files here."""
        return self._store.list(self._prefix)

    def children(self) -> list[str]:
        """Return the names of the checkpoints in this directory."""
        parts = (name.split("/") for name in self._store.list(self._prefix))
        return sorted(part[0] for part in parts if len(part) == 2 and part[1] == COMMIT)

    def child(self, name: str) -> Location:
        """Return a place in this directory."""
        return RemoteLocation(f"{self.path}/{name}", f"{self._prefix}/{name}", self._store)

    def remove(self) -> None:
        """Remove the checkpoint; its commit record goes first."""
        with contextlib.suppress(FileNotFoundError):
            self._store.delete([f"{self._prefix}/{COMMIT}"])
        self._store.delete([f"{self._prefix}/{name}" for name in self.files()])

    def sweep(self) -> list[str]:
        """Remove nothing: who wrote an object of a store cannot be asked whether it lives."""
        return []

    def sweep_beside(self) -> None:
        """Remove nothing, as `sweep`."""


class _RemoteWriter(Writer):
    def __init__(
        self, location: RemoteLocation, prefix: str, store: Store, generation: str
    ) -> None:
        self._location, self._prefix, self._store = location, prefix, store
        self._generation = generation
        self._committing = False

    def create(self, name: str, size: int, direct: bool = False) -> Sink:
        return _RemoteSink(self._store.open(f"{self._prefix}/{name}"))

    def put(self, name: str, data: bytes) -> None:
        self._store.put(f"{self._prefix}/{name}", data)

    def size(self, name: str) -> int:
        return self._store.size(f"{self._prefix}/{name}")

    def commit(self, record: bytes) -> None:
        before = self._names_before()
        self._committing = True
        self.put(COMMIT, record)
        with contextlib.suppress(OSError):  # they are in nobody's way
            self._store.delete([f"{self._prefix}/{name}" for name in before])

    def _names_before(self) -> list[str]:
        """Return the names of the objects that the commit replaces."""
        try:
            record = self._location.read(COMMIT)
            return list(decode_commit(record, f"{self._location.path}/{COMMIT}").files)
        except (OSError, RuntimeError):
            return []

    def _may_be_committed(self) -> bool:
        """Whether the commit object may name this save: a request that failed may have arrived."""
        if not self._committing:
            return False
        try:
            record = self._location.read(COMMIT)
            return decode_commit(record, self._location.path).generation == self._generation
        except FileNotFoundError:
            return False
        except (OSError, RuntimeError):
            return True

    def abort(self) -> None:
        if self._may_be_committed():
            return
        with contextlib.suppress(OSError, RuntimeError):
            mine = [n for n in self._location.files() if n.startswith(f"{self._generation}-")]
            self._store.delete([f"{self._prefix}/{name}" for name in mine])

    def leave(self) -> None:
        pass


class _RemoteSink(Sink):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._at = 0

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        if offset != self._at:
            raise io.UnsupportedOperation(f"an upload is at byte {self._at}, not {offset}")
        for view in views:
            self._file.write(bytes(view))
            self._at += len(view)

    def close(self) -> None:
        file, self._file = self._file, None
        file.close()

    def abandon(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(Exception):
                file.abandon()


class _RemoteFile(File):
    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.size = store.size(name)

    def read_into(self, offset: int, views: Sequence[memoryview]) -> None:
        wanted = sum(map(len, views))
        if offset + wanted > self.size:
            raise EOFError(f"{self._name} ends at byte {self.size}")
        if wanted <= _RANGE:  # small ones that follow each other: one request
            data = memoryview(self._get(offset, wanted))
            for view in views:
                view[:], data = data[: len(view)], data[len(view) :]
            return
        for view in views:
            for at in range(0, len(view), _RANGE):
                part = view[at : at + _RANGE]
                part[:] = self._get(offset + at, len(part))
            offset += len(view)

    def _get(self, offset: int, length: int) -> bytes:
        data = self._store.get_range(self._name, offset, length) if length else b""
        if len(data) != length:
            raise EOFError(f"{self._name}: the store gave {len(data)} of {length} bytes")
        return data

    def close(self) -> None:
        pass
