"""Whatever fsspec has a file system for."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Sequence
from typing import Any

from hfai.checkpoint.storage.remote import Store

# Schemes of file systems that replace a name in one step, and write a file in many. Object stores
# have a new object in one step; of other file systems that is not known.
_RENAMING = ("file", "local", "sftp", "ssh")


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
        self._renames = scheme in _RENAMING

    def put(self, name: str, data: bytes) -> None:
        """Write an object, in one step where the file system can."""
        self._make_parent(name)
        if not self._renames:
            self._fs.pipe_file(name, data)
            return
        part = f"{name}.{secrets.token_hex(4)}.part"
        try:
            self._fs.pipe_file(part, data)
            self._fs.mv(part, name)
        except BaseException:
            with contextlib.suppress(OSError):
                self._fs.rm_file(part)
            raise

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
        # What has no directories need not have the call; the write itself shows what is wrong.
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
        # An upload is broken off so; a local file cannot be and says it by a RuntimeError.
        with contextlib.suppress(AttributeError, RuntimeError):
            self._file.discard()
        with contextlib.suppress(OSError):  # what it still has to write may be what has failed
            self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._name)
