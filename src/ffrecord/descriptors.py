"""Open files of all readers of a process, no more than `limit` at a time.

A set of a thousand parts must not need a thousand descriptors, nor a thousand readers. A file is
opened when it is read, kept, and closed when others need the room; one that is being read stays.
Descriptors that a forked child inherits serve it as well, since every read carries its position;
it looks once whether they still are what they were, because a daemon closes all it inherits.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from collections import OrderedDict, deque
from collections.abc import Iterator

from ffrecord.errors import DamagedFileError


class SourceFile:
    """One file as it was when it was first opened; `path` is opened again under the same terms."""

    _numbers = itertools.count()

    def __init__(self, path: str) -> None:
        self.path = path
        self.absolute = os.path.abspath(path)
        """The same file after a change of directory."""
        self.number = next(self._numbers)
        self.identity: tuple[int, ...] | None = None

    @contextlib.contextmanager
    def access(self) -> Iterator[int]:
        """Give a descriptor, which stays open until the block is left."""
        with OPEN_FILES.lease(self) as (descriptor,):
            yield descriptor

    def open(self) -> int:
        """Open the file.

        Raises:
            DamagedFileError: Another file has this name now, or it was written to.
            OSError: It cannot be opened.
        """
        descriptor = os.open(self.absolute, os.O_RDONLY | os.O_CLOEXEC)
        status = os.fstat(descriptor)
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if self.identity is None:
            self.identity = identity
        elif self.identity != identity:
            os.close(descriptor)
            raise DamagedFileError(
                f"{self.path} was replaced or written to since it was opened: make a new reader",
                path=self.path,
            )
        return descriptor


class OpenFiles:
    """Descriptors by file, the least recently used closed first.

    Args:
        limit: How many stay open while nothing reads them.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._open: OrderedDict[int, int] = OrderedDict()
        self._files: dict[int, tuple[int, int]] = {}  # device and inode of what is open
        self._leases: dict[int, int] = {}
        self._forgotten: deque[int] = deque()
        self._lock = threading.Lock()
        self._are_inherited = False

    def __len__(self) -> int:
        return len(self._open)

    @contextlib.contextmanager
    def lease(self, *files: SourceFile) -> Iterator[list[int]]:
        """Give the files' descriptors, which stay open until the block is left.

        Raises:
            OSError: A file cannot be opened.
            DamagedFileError: A file was replaced.
        """
        taken: list[int] = []
        try:
            descriptors = []
            for file in files:
                descriptors.append(self._take(file))
                taken.append(file.number)
            yield descriptors
        finally:
            self._give_back(taken)

    def forget(self, file: SourceFile) -> None:
        """Close a file now, or, if it is being read, as soon as it is not.

        May be called by the garbage collector at any point, also while this thread holds the lock;
        then whoever holds it closes the file.
        """
        self._forgotten.append(file.number)
        if self._lock.acquire(blocking=False):
            try:
                self._close_forgotten()
            finally:
                self._lock.release()

    def _take(self, file: SourceFile) -> int:
        with self._lock:
            self._check_inherited()
            descriptor = self._open.get(file.number)
            if descriptor is None:
                self._make_room(1)
                descriptor = file.open()
                self._files[file.number] = _file_behind(descriptor)
                self._open[file.number] = descriptor
            else:
                self._open.move_to_end(file.number)
            self._leases[file.number] = self._leases.get(file.number, 0) + 1
            return descriptor

    def _give_back(self, numbers: list[int]) -> None:
        with self._lock:
            for number in numbers:
                left = self._leases.get(number, 1) - 1
                if left > 0:
                    self._leases[number] = left
                else:
                    self._leases.pop(number, None)
            self._close_forgotten()
            self._make_room(0)

    def _close_forgotten(self) -> None:
        self._check_inherited()
        for _ in range(len(self._forgotten)):
            number = self._forgotten.popleft()
            if number in self._leases:
                self._forgotten.append(number)
            elif number in self._open:
                os.close(self._drop(number))

    def _make_room(self, wanted: int) -> None:
        excess = len(self._open) + wanted - self.limit
        if excess <= 0:
            return
        idle = [number for number in self._open if number not in self._leases]
        for number in idle[:excess]:
            os.close(self._drop(number))

    def after_fork(self) -> None:
        """Go on in a child; a thread of the parent may have held the lock or a lease."""
        self._lock = threading.Lock()
        self._leases = {}
        self._are_inherited = True

    def _check_inherited(self) -> None:
        if not self._are_inherited:
            return
        self._are_inherited = False
        for number, descriptor in list(self._open.items()):
            if not _is_still(descriptor, self._files[number]):
                # Closed, and perhaps somebody else's by now: not ours to close.
                self._drop(number)

    def _drop(self, number: int) -> int:
        descriptor = self._open.pop(number)
        del self._files[number]  # last: what is open has one at any moment a fork may come
        return descriptor


def _is_still(descriptor: int, file: tuple[int, int]) -> bool:
    try:
        return _file_behind(descriptor) == file
    except OSError:
        return False


def _file_behind(descriptor: int) -> tuple[int, int]:
    status = os.fstat(descriptor)
    return status.st_dev, status.st_ino


OPEN_FILES = OpenFiles(limit=128)
"""The open files of this process."""
os.register_at_fork(after_in_child=OPEN_FILES.after_fork)
