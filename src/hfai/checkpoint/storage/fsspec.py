"""Whatever fsspec has a file system for."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from hfai.checkpoint.storage.remote import Store


class FileSystem(Store):
    """A file system of fsspec.

    Args:
        scheme: Of its URLs.

    Raises:
        ImportError: fsspec, or what it needs for the scheme, is missing.
        ValueError: fsspec does not know the scheme.
    """

    def __init__(self, scheme: str) -> None:
        try:
            import fsspec
        except ImportError as error:
            raise ImportError(
                f"{scheme}:// needs fsspec ({error}): pip install 'hfai[storage]'"
            ) from error
        self._fs: Any = fsspec.filesystem(scheme)

    def put(self, name: str, data: bytes) -> None:
        """Write an object in one step."""
        self._make_parent(name)
        self._fs.pipe_file(name, data)

    def get(self, name: str) -> bytes:
        """Return an object."""
        data: bytes = self._fs.cat_file(name)
        return data

    def get_range(self, name: str, start: int, length: int) -> bytes:
        """Return bytes of an object."""
        data: bytes = self._fs.cat_file(name, start=start, end=start + length)
        return data

    def size(self, name: str) -> int:
        """Return an object's bytes."""
        self._fs.invalidate_cache()
        return int(self._fs.info(name)["size"])

    def list(self, prefix: str) -> dict[str, int]:
        """Return all objects below a name: the rest of their names, and sizes."""
        self._fs.invalidate_cache()
        found = self._fs.find(prefix, detail=True)
        return {
            name.partition(prefix.strip("/") + "/")[2]: int(entry["size"])
            for name, entry in found.items()
        }

    def delete(self, names: Sequence[str]) -> None:
        """Remove objects."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm_file(name)

    def open(self, name: str) -> Any:
        """Return a file to write, which appears when it is closed."""
        self._make_parent(name)
        return _Written(self._fs, name)

    def _make_parent(self, name: str) -> None:
        with contextlib.suppress(NotImplementedError):
            self._fs.makedirs(name.rpartition("/")[0], exist_ok=True)


class _Written:
    def __init__(self, fs: Any, name: str) -> None:
        self._fs, self._name = fs, name
        self._file: Any = fs.open(name, "wb")

    def write(self, data: bytes) -> None:
        self._file.write(data)

    def close(self) -> None:
        self._file.close()

    def abandon(self) -> None:
        if hasattr(self._file, "discard"):
            self._file.discard()
        self._file.close()
        self._fs.rm_file(self._name)
