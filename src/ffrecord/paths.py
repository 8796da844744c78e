"""Which files a reader's argument names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ffrecord.format import SUFFIX
from ffrecord.store_options import StoreOptions, is_url

PathLike = str | os.PathLike[str]


def expand(given: PathLike | Iterable[PathLike], storage: StoreOptions) -> list[str]:
    """Return the record files of one path or URL, of a list of them, or in a directory.

    A directory stands for its own `*.ffr` files, sorted as strings; parts in directories below it
    are not looked for.

    Raises:
        FileNotFoundError: A path does not exist, or a directory has no record files.
        ValueError: A file's name does not end with `.ffr`, it is not a regular file, or the list
            is empty.
    """
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
        if is_url(path):
            return _in_store(path, storage)
        if os.path.isdir(path):
            files = sorted(
                entry.path
                for entry in os.scandir(path)
                if entry.name.endswith(SUFFIX) and not entry.is_dir()
            )
            if not files:
                raise FileNotFoundError(f"no {SUFFIX} files in the directory {path}")
            return [_checked(file) for file in files]
        return [_checked(path)]
    paths = [os.fspath(path) for path in given]
    if not paths:
        raise ValueError("no files: the list is empty")
    remote = [path for path in paths if is_url(path)]
    if not remote:
        return [_checked(path) for path in paths]
    if len(remote) < len(paths):
        raise ValueError(
            f"a reader reads local files or objects of stores, not both: {remote[0]} is among "
            f"{len(paths) - len(remote)} local paths"
        )
    return [file for url in remote for file in _in_store(url, storage)]


def _in_store(url: str, storage: StoreOptions) -> list[str]:
    from ffrecord.store import expand_url

    return expand_url(url, storage)


def _checked(path: str) -> str:
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        raise FileNotFoundError(f"no such file: {path}") from None
    if not path.endswith(SUFFIX) or not Path(path).stem:
        raise ValueError(f"{path}: the name of a record file ends with {SUFFIX}")
    # Opening a pipe would wait for its writer.
    if not stat.S_ISREG(mode):
        raise ValueError(f"{path} is not a regular file")
    return path
