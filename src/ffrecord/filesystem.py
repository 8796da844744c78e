"""A packed folder as a read-only file system of `fsspec`: the protocol "ffrecord".

    fsspec.open("ffrecord://images/7.jpg::/data/train.ffr")
    fsspec.filesystem("ffrecord", fo="/data/train.ffr").cat(["images/7.jpg", "images/8.jpg"])

fsspec finds it by its entry point once hfai is installed; importing this module registers it, too.
A file is one record, so opening one reads it whole, and `cat` of many is one batch.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from typing import Any

try:
    import fsspec
    from fsspec.spec import AbstractFileSystem
except ImportError as error:
    raise ImportError(
        f"packed folders as a file system need fsspec ({error}): pip install 'hfai[storage]'"
    ) from error

import numpy as np

from ffrecord import folder_index
from ffrecord.folder import PackedFolder
from ffrecord.paths import PathLike

PROTOCOL = "ffrecord"
_LOCAL = (None, "file", "local")


class PackedFolderFileSystem(AbstractFileSystem):
    """The files of a packed folder.

    Args:
        fo: The record file.
        check_data: Compare checksums.
        target_protocol: What fsspec says in front of `fo`, in a chain of URLs.
        target_options: Ignored: they are fsspec's, for other file systems.
        options: fsspec's own.

    Raises:
        FileNotFoundError: There is no such record file.
        DamagedFileError: It is no packed folder, or is damaged.
        ValueError: It is given by a protocol that record files are not read by.
    """

    protocol = PROTOCOL
    root_marker = ""
    cachable = False  # a file may be written anew under its name

    def __init__(
        self,
        fo: PathLike = "",
        check_data: bool = True,
        target_protocol: str | None = None,
        target_options: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        if not fo:
            raise ValueError(
                "no record file: give fo=…, or a URL like ffrecord://path::/data/packed.ffr"
            )
        name = os.fspath(fo).removeprefix("file://")
        if target_protocol not in _LOCAL and "://" not in name:
            name = f"{target_protocol}://{name}"
        self._packed = PackedFolder(name, check_data)
        self._records = dict(folder_index.walk(self._packed.tree))
        offsets = self._packed.reader.get_offsets(0)
        self._sizes = np.diff(offsets)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(one) for one in path]
        text = str(path).removeprefix(f"{PROTOCOL}://")
        return "/".join(part for part in text.split("/") if part not in ("", "."))

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        """Return name, size in bytes and type ("file" or "directory") of a path."""
        path = self._strip_protocol(path)
        if path == self.root_marker:
            return {"name": "", "size": 0, "type": "directory"}
        if path not in self._records:
            raise FileNotFoundError(f"no {path} in {self._packed.reader.fnames[-1]}")
        record = self._records[path]
        if record is None:
            return {"name": path, "size": 0, "type": "directory"}
        return {"name": path, "size": int(self._sizes[record]), "type": "file"}

    def ls(self, path: str, detail: bool = True, **options: Any) -> list[Any]:
        """Return what is in a directory, or a file itself: `info`s, or names without `detail`."""
        path = self._strip_protocol(path)
        found = self.info(path)
        if found["type"] == "directory":
            prefix = f"{path}/" if path else ""
            names = [prefix + name for name in self._packed.list(path)]
        else:
            names = [path]
        return [self.info(name) for name in names] if detail else names

    def cat_file(
        self, path: str, start: int | None = None, end: int | None = None, **options: Any
    ) -> bytes:
        """Return a file's bytes, or those from `start` to `end`, which may be negative."""
        data = self._packed.read_one(self._strip_protocol(path))
        return bytes(data[slice(start, end)].data)

    def cat(
        self, path: Any, recursive: bool = False, on_error: str = "raise", **options: Any
    ) -> Any:
        """Return the bytes of one file, or of many by path, which are read as one batch.

        With `on_error` other than "raise" missing files are left out ("omit"), or their errors are
        returned ("return").
        """
        paths = self.expand_path(path, recursive=recursive)
        files = [one for one in paths if self._records.get(one) is not None]
        found: dict[str, Any] = {}
        for one in paths:
            if one not in self._records:
                error = FileNotFoundError(f"no {one} in {self._packed.reader.fnames[-1]}")
                if on_error == "raise":
                    raise error
                if on_error == "return":
                    found[one] = error
        batch = self._packed.read(files)
        found |= {name: data.tobytes() for name, data in zip(files, batch, strict=True)}
        if len(paths) > 1 or isinstance(path, list) or paths[0] != self._strip_protocol(path):
            return found
        if not files:
            raise IsADirectoryError(f"{path} is a directory")
        return found[paths[0]]

    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BytesIO:
        if mode != "rb":
            raise ValueError(f"mode is {mode!r}: a packed folder is only read, with 'rb'")
        return io.BytesIO(self.cat_file(path))


fsspec.register_implementation(PROTOCOL, PackedFolderFileSystem, clobber=True)
