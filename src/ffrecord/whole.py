"""A directory or a file that appears under its name when all of it is written, or not at all.

Only the process that began renames and removes: a forked child that leaves the block disturbs
nobody.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ffrecord.writer import flush_directory, named_after

_FLUSHING = 8  # threads
_AT_A_TIME = 1024  # files, so that a million of them do not all wait as tasks


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Give a working directory beside `target`, and rename it to `target` at the end.

    All files in it are flushed to the disk before. Its mode is by umask. An exception removes it.

    Raises:
        OSError: `target` exists and is not an empty directory, or cannot be written.
        ValueError: The end was reached in a forked child.
    """
    target = target.absolute()
    process = os.getpid()
    work = _beside(target)
    try:
        work.mkdir()
    except OSError as error:
        raise named_after(error, target) from None
    try:
        yield work
        _need_process(process, target)
        _flush_all(work)
        os.rename(work, target)
    except BaseException:
        if os.getpid() == process:
            shutil.rmtree(work, ignore_errors=True)
        raise
    flush_directory(target.parent)


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a new name beside `target` to write under, and rename that to `target` at the end.

    Something must be written under it. An exception removes it.

    Raises:
        OSError: There is no directory for it, or the file cannot be flushed or renamed.
        ValueError: The end was reached in a forked child.
    """
    target = target.absolute()
    process = os.getpid()
    if not target.parent.is_dir():
        raise FileNotFoundError(f"no such directory: {target.parent}, for {target.name}")
    work = _beside(target)
    try:
        yield work
        _need_process(process, target)
        _flush_file(work)
        os.replace(work, target)
    except BaseException:
        if os.getpid() == process:
            with contextlib.suppress(OSError):
                os.unlink(work)
        raise
    flush_directory(target.parent)


def _beside(target: Path) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")


def _need_process(process: int, target: Path) -> None:
    if os.getpid() != process:
        raise ValueError(f"{target} is written by another process, not by a forked child")


def _flush_all(directory: Path) -> None:
    """Flush all files and directories, several at a time: the file system waits once for many."""
    files, directories = [], []
    for path, _, names in os.walk(directory, topdown=False, onerror=_raise):
        directories.append(Path(path))
        files += [os.path.join(path, name) for name in names]
    with ThreadPoolExecutor(_FLUSHING, "ffrecord-flush") as pool:
        for first in range(0, len(files), _AT_A_TIME):
            for _ in pool.map(_flush_file, files[first : first + _AT_A_TIME]):
                pass
        for _ in pool.map(flush_directory, directories):
            pass


def _raise(error: OSError) -> None:
    raise error


def _flush_file(path: str | Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
