"""Checkpoints in this machine's file system, or one that it mounts.

A save writes into `.NAME.GENERATION.tmp`, a directory beside its name, flushes every file and the
directory, and renames it. Where a checkpoint of that name exists the two directories change places
in one step (renameat2 with RENAME_EXCHANGE), and the old one is removed. A file system that cannot
do that gets two renames: `.NAME.old` is the old checkpoint until the new one has its name, and a
reader that finds none under the name looks there. What is removed gets a temporary name first.

Every process that writes holds a shared lock on the temporary directory. The kernel lets go of it
when the process dies, however it dies, which is how a later job knows what it may remove.

A name that is a symbolic link is never written through, and of one that is removed only the link
goes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import functools
import os
import re
import secrets
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hfai.checkpoint.format import COMMIT, is_name
from hfai.checkpoint.storage.base import File, Location, Sink, Writer

_TEMPORARY = ".tmp"
_OLD = ".old"
_MOST_VIEWS = 1000  # of one preadv or pwritev; Linux takes 1024
_EXCHANGE = 2  # RENAME_EXCHANGE
_HERE = -100  # AT_FDCWD
# A directory that nobody locks may be of a writer on another machine whose locks are not seen here.
_ABANDONED_AFTER = 600.0  # seconds without a change
_LONGEST = 255  # bytes of a name in Linux's file systems
_GENERATION = 16  # hexadecimal digits


class LocalLocation(Location):
    """A directory."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(os.path.expanduser(path))

    def writer(self, generation: str) -> Writer:
        """Begin to write a checkpoint here."""
        return _LocalWriter(Path(self.path), generation)

    def name_of(self, name: str, generation: str) -> str:
        """Return what a file of a checkpoint is called here."""
        return name

    def read(self, name: str) -> bytes:
        """Return a small file."""
        return self._find(name).read_bytes()

    def open(self, name: str) -> File:
        """Open a file."""
        return _LocalFile(self._find(name))

    def is_committed(self) -> bool:
        """Whether a checkpoint is here."""
        return self._find(COMMIT).is_file()

    def files(self) -> dict[str, int]:
        """Return names and sizes of all files here."""
        return {entry.name: entry.stat().st_size for entry in os.scandir(self._find("").parent)}

    def children(self) -> list[str]:
        """Return the names of the checkpoints in this directory."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = {name.removeprefix(".").removesuffix(_OLD) for name in self._visible()}
            return sorted(name for name in found if self.child(name).is_committed())
        return []

    def unfinished(self) -> list[str]:
        """Return names of directories here with a checkpoint's files and no commit record."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = [name for name in os.listdir(self.path) if not name.startswith(".")]
            return sorted(name for name in names if _is_headless(Path(self.path, name)))
        return []

    def _visible(self) -> list[str]:
        return [n for n in os.listdir(self.path) if not n.startswith(".") or n.endswith(_OLD)]

    def child(self, name: str) -> Location:
        """Return a place in this directory."""
        return LocalLocation(os.path.join(self.path, name))

    def remove(self) -> None:
        """Remove the checkpoint: its name first, so that `sweep` finds what a kill leaves."""
        path = Path(self.path)
        for directory in (path, _old(path)):
            with contextlib.suppress(FileNotFoundError):
                if directory.is_symlink():
                    directory.unlink()
                    continue
                aside = _temporary(path, secrets.token_hex(_GENERATION // 2))
                directory.rename(aside)
                flush_directory(aside.parent)
                shutil.rmtree(aside)

    def sweep(self) -> list[str]:
        """Remove what dead writers left in this directory."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(self.path)):
                left = entry.name.startswith(".") and entry.name.endswith(_TEMPORARY)
                if left and entry.is_dir(follow_symlinks=False) and _remove_abandoned(entry.path):
                    found.append(entry.name)
        return found

    def sweep_beside(self) -> None:
        """Remove what dead writers of this name left."""
        directory, name = os.path.split(self.path)
        left = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{{_GENERATION}}}{_TEMPORARY}", re.DOTALL)
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory):
                if left.fullmatch(entry):
                    _remove_abandoned(os.path.join(directory, entry))

    def _find(self, name: str) -> Path:
        """Return the path of a file: of the old checkpoint, between the renames of a new one."""
        path = Path(self.path)
        if not path.exists() and _old(path).exists():
            path = _old(path)
        return path / (name or COMMIT)


class _LocalWriter(Writer):
    def __init__(self, target: Path, generation: str) -> None:
        self._target = target
        length, added = len(os.fsencode(target.name)), len(f"..{generation}{_TEMPORARY}")
        if length + added > _LONGEST:
            raise OSError(
                errno.ENAMETOOLONG,
                f"the name has {length} bytes: give one of at most {_LONGEST - added}, since a "
                "temporary one is made from it",
                str(target),
            )
        _need_replaceable(target)  # now, not when all is written
        self._work = _temporary(target, generation)
        self._descriptor = _made_and_locked(self._work)

    def create(self, name: str, size: int) -> Sink:
        return _LocalSink(self._work / name)

    def put(self, name: str, data: bytes) -> None:
        sink = _LocalSink(self._work / name)
        try:
            sink.write(0, [memoryview(data)])
            sink.close()
        finally:
            sink.abandon()

    def size(self, name: str) -> int:
        return os.stat(self._work / name).st_size

    def commit(self, record: bytes) -> None:
        self.put(COMMIT, record)
        flush_directory(self._work)
        _put_in_place(self._work, self._target)
        try:
            flush_directory(self._target.parent)
        except OSError as error:
            # Whether the new one would be there after a power cut is not known: the old one stays.
            raise _named(error, self._put_back(record)) from None
        # What stood there before: under the temporary name, or left between two renames.
        for before in (self._work, _old(self._target)):
            if before.exists():
                with contextlib.suppress(OSError):
                    os.unlink(before / COMMIT)
                shutil.rmtree(before, ignore_errors=True)
        self.leave()

    def _put_back(self, record: bytes) -> Path:
        """Let what stood there before have its name again; return where the error happened."""
        work, target, old = self._work, self._target, _old(self._target)
        with contextlib.suppress(OSError):
            if (target / COMMIT).read_bytes() != record:  # another writer's by now
                return target.parent
            if work.exists():
                _exchange(work, target)
            else:
                target.rename(work)
                if old.exists():
                    old.rename(target)
        return target.parent

    def abort(self) -> None:
        shutil.rmtree(self._work, ignore_errors=True)
        self.leave()

    def leave(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def _made_and_locked(path: Path) -> int:
    """Make a directory, where another process has not, and return a descriptor that locks it."""
    while True:
        path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue  # `sweep` was quicker
        with contextlib.suppress(OSError):  # some network file systems lock no directories
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if os.fstat(descriptor).st_nlink and path.exists():
            return descriptor
        os.close(descriptor)  # `sweep` was quicker than the lock


class _LocalSink(Sink):
    def __init__(self, path: Path) -> None:
        self._path = path
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)

    def write(self, offset: int, views: Sequence[memoryview]) -> None:
        try:
            for at in range(0, len(views), _MOST_VIEWS):
                offset += _write_all(self._descriptor, views[at : at + _MOST_VIEWS], offset)
        except OSError as error:
            raise _named(error, self._path) from None

    def close(self) -> None:
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise _named(error, self._path) from None
        self.abandon()

    def abandon(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)


class _LocalFile(File):
    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._descriptor).st_size

    def read_into(self, offset: int, views: Sequence[memoryview]) -> None:
        for at in range(0, len(views), _MOST_VIEWS):
            batch = views[at : at + _MOST_VIEWS]
            wanted = sum(map(len, batch))
            done = os.preadv(self._descriptor, batch, offset)
            offset += done
            if done < wanted:
                self._read_on(offset, batch, done)
                offset += wanted - done

    def _read_on(self, offset: int, views: Sequence[memoryview], done: int) -> None:
        """Go on after a short read: one call moves 2 GiB at most, and a signal may cut it."""
        for view in views:
            skipped = min(done, len(view))
            done -= skipped
            while skipped < len(view):
                read = os.preadv(self._descriptor, [view[skipped:]], offset)
                if read == 0:
                    raise EOFError(f"{self._path} ends at byte {offset}")
                skipped += read
                offset += read

    def close(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


def flush_directory(path: str | os.PathLike[str]) -> None:
    """Make the names in a directory last, where its file system can."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)


def _write_all(descriptor: int, views: Sequence[memoryview], offset: int) -> int:
    total = sum(map(len, views))
    done = os.pwritev(descriptor, views, offset) if total else 0
    if done == total:
        return total
    skip = done
    for view in views:  # a signal or the limit of 2 GiB has cut it short
        start = min(skip, len(view))
        skip -= start
        while start < len(view):
            written = os.pwrite(descriptor, view[start:], offset + done)
            start += written
            done += written
    return total


def _put_in_place(work: Path, target: Path) -> None:
    """Rename a directory to a name that may be taken."""
    for _ in range(100):  # another writer may come between any two of these steps
        try:
            os.rename(work, target)
            return
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise
        _need_replaceable(target)
        try:
            if not _exchange(work, target):
                _swap_by_two_renames(work, target)
            return
        except FileNotFoundError:
            continue
    raise OSError(errno.EBUSY, "other writers replace it all the time", str(target))


def _need_replaceable(target: Path) -> None:
    """Refuse to replace what is no checkpoint, whole or without its commit record.

    An empty directory may be replaced.
    """
    if target.is_symlink():
        raise FileExistsError(
            errno.EEXIST,
            "is a symbolic link, which is not written through: give the path that it points to, "
            "or remove it",
            str(target),
        )
    if not target.exists() or (target / COMMIT).is_file() or _is_headless(target):
        return
    if not target.is_dir() or any(target.iterdir()):
        raise FileExistsError(
            errno.EEXIST, "is there and is no checkpoint: give another name", str(target)
        )


def _exchange(first: Path, second: Path) -> bool:
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
    old = _old(target)
    if old.exists() and target.exists():
        shutil.rmtree(old)
    os.rename(target, old)
    os.rename(work, target)  # the old one goes when that is flushed


def _old(target: Path) -> Path:
    return target.with_name(f".{target.name}{_OLD}")


def _temporary(target: Path, generation: str) -> Path:
    return target.with_name(f".{target.name}.{generation}{_TEMPORARY}")


def _is_headless(path: Path) -> bool:
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


def _remove_abandoned(path: str) -> bool:
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


def _named(error: OSError, path: Path) -> OSError:
    """Return the error with the path it was about."""
    return type(error)(error.errno, error.strerror, str(path))
