"""Which files a reader's argument names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from ffrecord.format import SUFFIX

PathLike = str | os.PathLike[str]


def expand(given: PathLike | Iterable[PathLike]) -> list[str]:
    """Return the record files of one path, of a list of paths, or in a directory.

    A directory stands for its own `*.ffr` files, sorted as strings; parts in directories below it
    are not looked for.

    Raises:
        FileNotFoundError: A path does not exist, or a directory has no record files.
        ValueError: A file's name does not end with `.ffr`, it is not a regular file, or the list
            is empty.
    """
    if isinstance(given, (str, os.PathLike)):
        path = os.fspath(given)
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
    files = [_checked(os.fspath(path)) for path in given]
    if not files:
        raise ValueError("no files: the list is empty")
    return files


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
