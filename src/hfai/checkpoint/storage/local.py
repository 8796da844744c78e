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
import errno
import fcntl
import os
import re
import secrets
import shutil
from pathlib import Path

from hfai.checkpoint.format import COMMIT
from hfai.checkpoint.storage.base import File, Location, Sink, Writer
from hfai.checkpoint.storage.local_files import LocalFile, LocalSink, flush_directory, named
from hfai.checkpoint.storage.local_names import (
    OLD,
    TEMPORARY,
    exchange,
    is_headless,
    need_replaceable,
    old_name,
    put_in_place,
    remove_abandoned,
    temporary_name,
)

_LONGEST = 255  # bytes of a name in Linux's file systems
_GENERATION = 16  # hexadecimal digits
_LOOKS = 100  # at a directory that changes each time


class LocalLocation(Location):
    """A directory."""

    at_once = 32 << 20

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
        return LocalFile(self._find(name))

    def is_committed(self) -> bool:
        """Whether a checkpoint is here."""
        return self._find(COMMIT).is_file()

    def files(self) -> dict[str, int]:
        """Return names and sizes of all files here."""
        return {entry.name: entry.stat().st_size for entry in os.scandir(self._find("").parent)}

    def children(self) -> list[str]:
        """Return the names of the checkpoints in this directory."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for _ in range(_LOOKS):
                seen = self._visible()
                found = {name.removeprefix(".").removesuffix(OLD) for name in seen}
                names = sorted(name for name in found if self.child(name).is_committed())
                # Retention may have removed all that were listed while newer ones were saved.
                if names or sorted(seen) == sorted(self._visible()):
                    return names
        return []

    def unfinished(self) -> list[str]:
        """Return names of directories here with a checkpoint's files and no commit record."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            names = [name for name in os.listdir(self.path) if not name.startswith(".")]
            return sorted(name for name in names if is_headless(Path(self.path, name)))
        return []

    def _visible(self) -> list[str]:
        return [n for n in os.listdir(self.path) if not n.startswith(".") or n.endswith(OLD)]

    def child(self, name: str) -> Location:
        """Return a place in this directory."""
        return LocalLocation(os.path.join(self.path, name))

    def remove(self) -> None:
        """Remove the checkpoint: its name first, so that `sweep` finds what a kill leaves."""
        path = Path(self.path)
        for directory in (path, old_name(path)):
            with contextlib.suppress(FileNotFoundError):
                if directory.is_symlink():
                    directory.unlink()
                    continue
                aside = temporary_name(path, secrets.token_hex(_GENERATION // 2))
                directory.rename(aside)
                flush_directory(aside.parent)
                shutil.rmtree(aside)

    def sweep(self) -> list[str]:
        """Remove what dead writers left in this directory."""
        found = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            for entry in list(os.scandir(self.path)):
                left = entry.name.startswith(".") and entry.name.endswith(TEMPORARY)
                if left and entry.is_dir(follow_symlinks=False) and remove_abandoned(entry.path):
                    found.append(entry.name)
        return found

    def sweep_beside(self) -> None:
        """Remove what dead writers of this name left."""
        directory, name = os.path.split(self.path)
        left = re.compile(rf"\.{re.escape(name)}\.[0-9a-f]{{{_GENERATION}}}{TEMPORARY}", re.DOTALL)
        with contextlib.suppress(OSError):
            for entry in os.listdir(directory):
                if left.fullmatch(entry):
                    remove_abandoned(os.path.join(directory, entry))

    def _find(self, name: str) -> Path:
        """Return the path of a file: of the old checkpoint, between the renames of a new one."""
        path = Path(self.path)
        if not path.exists() and old_name(path).exists():
            path = old_name(path)
        return path / (name or COMMIT)


class _LocalWriter(Writer):
    def __init__(self, target: Path, generation: str) -> None:
        self._target = target
        length, added = len(os.fsencode(target.name)), len(f"..{generation}{TEMPORARY}")
        if length + added > _LONGEST:
            raise OSError(
                errno.ENAMETOOLONG,
                f"the name has {length} bytes: give one of at most {_LONGEST - added}, since a "
                "temporary one is made from it",
                str(target),
            )
        need_replaceable(target)  # now, not when all is written
        self._work = temporary_name(target, generation)
        self._descriptor = _made_and_locked(self._work)

    def create(self, name: str, size: int, direct: bool = False) -> Sink:
        return LocalSink(self._work / name, size, direct)

    def put(self, name: str, data: bytes) -> None:
        sink = LocalSink(self._work / name)
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
        put_in_place(self._work, self._target)
        try:
            flush_directory(self._target.parent)
        except OSError as error:
            # Whether the new one would be there after a power cut is not known: the old one stays.
            raise named(error, self._put_back(record)) from None
        # What stood there before: under the temporary name, or left between two renames.
        for before in (self._work, old_name(self._target)):
            if before.exists():
                with contextlib.suppress(OSError):
                    os.unlink(before / COMMIT)
                shutil.rmtree(before, ignore_errors=True)
        self.leave()

    def _put_back(self, record: bytes) -> Path:
        """Let what stood there before have its name again; return where the error happened."""
        work, target, old = self._work, self._target, old_name(self._target)
        with contextlib.suppress(OSError):
            if (target / COMMIT).read_bytes() != record:  # another writer's by now
                return target.parent
            if work.exists():
                exchange(work, target)
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
