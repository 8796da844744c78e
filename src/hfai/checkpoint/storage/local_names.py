"""Names of checkpoints in a file system: made, replaced in one step, found abandoned.

See local.py for the rules that these steps make up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import shutil
import time
from pathlib import Path
from typing import Any

from hfai.checkpoint.format import COMMIT, is_name

TEMPORARY = ".tmp"
OLD = ".old"
_EXCHANGE = 2  # RENAME_EXCHANGE
_HERE = -100  # AT_FDCWD
# A directory that nobody locks may be of a writer on another machine whose locks are not seen here.
_ABANDONED_AFTER = 600.0  # seconds without a change


def put_in_place(work: Path, target: Path) -> None:
    """Rename a directory to a name that may be taken."""
    for _ in range(100):  # another writer may come between any two of these steps
        try:
            os.rename(work, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        need_replaceable(target)
        try:
            if not exchange(work, target):
                _swap_by_two_renames(work, target)
            return
        except FileNotFoundError:
            continue
    raise OSError(errno.EBUSY, "other writers replace it all the time", str(target))


def need_replaceable(target: Path) -> None:
    """Refuse to replace what is no checkpoint, whole or without its commit record.

    An empty directory may be replaced. What has this process's working directory in it may not:
    that would be taken from under the process, whose relative paths would lead nowhere.
    """
    if target.is_symlink():
        raise FileExistsError(
            errno.EEXIST,
            "is a symbolic link, which is not written through: give the path that it points to, "
            "or remove it",
            str(target),
        )
    if not target.exists():
        return
    replaceable = (target / COMMIT).is_file() or is_headless(target)
    if not replaceable and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(
            errno.EEXIST, "is there and is no checkpoint: give another name", str(target)
        )
    with contextlib.suppress(FileNotFoundError):  # of a directory that is removed already
        here, real = Path.cwd(), target.resolve()
        if real in (here, *here.parents):
            raise OSError(
                errno.EBUSY,
                "is, or has in it, this process's working directory, which a save would remove: "
                "give another name, such as ./checkpoint",
                str(target),
            )


def exchange(first: Path, second: Path) -> bool:
    """Let two names change places in one step; False where the file system cannot."""
    call = _renameat2()
    if call is None:
        return False
    if call(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(second))


def _swap_by_two_renames(work: Path, target: Path) -> None:
    old = old_name(target)
    if old.exists() and target.exists():
        shutil.rmtree(old)
    os.rename(target, old)
    os.rename(work, target)  # the old one goes when that is flushed


def old_name(target: Path) -> Path:
    """Return what a checkpoint is called between the two renames that replace it."""
    return target.with_name(f".{target.name}{OLD}")


def temporary_name(target: Path, generation: str) -> Path:
    """Return what a checkpoint is called while it is written, and while it is removed."""
    return target.with_name(f".{target.name}.{generation}{TEMPORARY}")


def is_headless(path: Path) -> bool:
    """Whether a directory has a checkpoint's files, and nothing else, and no commit record."""
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return any(name.endswith(".json") for name in names) and all(map(is_name, names))


@functools.cache
def _renameat2() -> Any:
    """Return libc's function, or None where it has none."""
    try:
        return ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return None


def remove_abandoned(path: str) -> bool:
    """Remove a temporary directory that no living process writes into; say whether it was."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # no locks here: judge by the time of the last change
        times = [os.stat(path).st_mtime, *(entry.stat().st_mtime for entry in os.scandir(path))]
        if time.time() - max(times) < _ABANDONED_AFTER:
            return False
    else:
        # Under the lock, so that a writer that made the directory just now notices.
        shutil.rmtree(path, ignore_errors=True)
        return True
    finally:
        os.close(descriptor)
    shutil.rmtree(path, ignore_errors=True)
    return True
