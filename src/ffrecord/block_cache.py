"""Blocks of remote objects on a local disk, shared by the processes of a machine.

A block is a file, `XX/<digest>-<number>`: its bytes, then their CRC-32. The digest is of the
object's URL and version, so an object that was written again has other blocks. A block gets its
name when it is whole; one that is not (a full disk, a crash) fails its checksum and is fetched
again. Removing one does not disturb whoever has it open, so nobody counts readers.

What all blocks take is kept below the bound by a number in the file `bytes`, changed under a lock:
room is reserved before a block is written. A process that dies in between leaves the number too
high, which the next clearing, which counts, puts right; a number that cannot be read is counted.

A cache that fails costs time, never a read: what cannot be kept is not, and that is said once.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import time
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

BLOCK = 256 << 10
"""Bytes of a block, of which an object's last one may have fewer."""

_CHECKSUM = 4  # bytes after a block
_LEFT_AFTER_CLEARING = 0.8  # of the bound
_ABANDONED = 600.0  # seconds after which a file that is being written is taken for left behind
# A block's time of use is kept to this many seconds, so that hits seldom write.
_FRESH = 60.0


class BlockCache:
    """The blocks in a directory.

    Args:
        directory: Made where it does not exist.
        most: The bytes that all blocks together may take.

    Raises:
        OSError: The directory cannot be made or written to.
    """

    def __init__(self, directory: str | os.PathLike[str], most: int) -> None:
        if most < BLOCK + _CHECKSUM:
            raise ValueError(f"cache_bytes is {most}: give {BLOCK + _CHECKSUM} or more")
        self.directory = Path(directory)
        self.most = most
        self._has_warned = False
        with self._locked():
            pass

    def get(self, url: str, version: str, number: int) -> bytes | None:
        """Return a block, or None where it is not there whole."""
        path = self._path(url, version, number)
        try:
            with open(path, "rb") as file:
                content = file.read()
                used = os.fstat(file.fileno()).st_mtime
        except OSError:
            return None
        block, checksum = content[:-_CHECKSUM], content[-_CHECKSUM:]
        if zlib.crc32(block).to_bytes(_CHECKSUM, "little") != checksum:
            with contextlib.suppress(OSError):
                self._remove(path)
            return None
        if time.time() - used > _FRESH:
            with contextlib.suppress(OSError):
                os.utime(path)
        return block

    def put(self, url: str, version: str, number: int, block: bytes) -> None:
        """Keep a block, or do not: without room within the bound, or where the disk refuses."""
        path = self._path(url, version, number)
        try:
            if not path.exists():
                self._keep(path, block)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                warnings.warn(
                    f"blocks are not kept in the cache {self.directory}: {error}", stacklevel=2
                )

    def used(self) -> int:
        """Return the bytes that are reserved for blocks."""
        with self._locked() as file:
            return self._reserved(file)

    def _reserved(self, file: int) -> int:
        number = _number(file)
        return self._clear(None) if number is None else number

    def _path(self, url: str, version: str, number: int) -> Path:
        digest = hashlib.sha256(f"{url}\0{version}\0{BLOCK}".encode()).hexdigest()[:32]
        return self.directory / digest[:2] / f"{digest}-{number}"

    def _keep(self, path: Path, block: bytes) -> None:
        size = len(block) + _CHECKSUM
        temporary = self._make(path.parent, size)
        if temporary is None:
            return
        kept = False
        try:
            with open(temporary, "r+b") as file:
                file.write(block)
                file.write(zlib.crc32(block).to_bytes(_CHECKSUM, "little"))
            # A link does not replace: of two that write a block, the second finds it there.
            with contextlib.suppress(FileExistsError):
                os.link(temporary, path)
                kept = True
        finally:
            if kept:
                temporary.unlink(missing_ok=True)
            else:
                self._remove(temporary)

    def _make(self, folder: Path, size: int) -> Path | None:
        """Reserve room and make the file that takes it; whoever clears meanwhile counts it.

        Returns:
            The file, or None where others are writing what fills the bound.
        """
        with self._locked() as file:
            total = self._reserved(file) + size
            if total > self.most:
                total = self._clear(int(self.most * _LEFT_AFTER_CLEARING) - size) + size
            if total > self.most:
                _set_number(file, total - size)
                return None
            _set_number(file, total)
            try:
                return _new_file(folder, size)
            except BaseException:
                _set_number(file, total - size)
                raise

    def _remove(self, path: Path) -> None:
        """Remove a file and give back its room; if it is gone, so is that.

        Both under one lock: a clearing in between would count without it, and it would be taken
        off twice.
        """
        with self._locked() as file, contextlib.suppress(FileNotFoundError):
            size = path.stat().st_size
            path.unlink()
            number = _number(file)
            if number is not None:
                _set_number(file, max(number - size, 0))

    def _clear(self, most: int | None) -> int:
        """Remove the blocks that were not used for the longest time; return what is left.

        Args:
            most: How many bytes to leave; None: all.
        """
        found: list[tuple[float, int, str]] = []
        for folder in os.scandir(self.directory):
            if not folder.is_dir():
                continue
            for entry in os.scandir(folder.path):
                with contextlib.suppress(OSError):
                    status = entry.stat()
                    abandoned = time.time() - status.st_mtime > _ABANDONED
                    if entry.name.startswith(".new-") and abandoned:
                        os.unlink(entry.path)
                        continue
                    found.append((status.st_mtime, status.st_size, entry.path))
        left = sum(size for _, size, _ in found)
        for _, size, path in sorted(found):
            if most is None or left <= most:
                break
            if not os.path.basename(path).startswith(".new-"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                left -= size
        return left

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        self.directory.mkdir(parents=True, exist_ok=True)  # it may be removed at any time
        descriptor = os.open(self.directory / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            # Closing alone would leave the lock to a child that was forked meanwhile.
            fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)


def _new_file(folder: Path, size: int) -> Path:
    """Make a file of a size, with the mode that the umask leaves, so that all may share it."""
    folder.mkdir(exist_ok=True)
    path = folder / f".new-{secrets.token_hex(6)}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    descriptor = os.open(path, flags, 0o666)
    try:
        os.ftruncate(descriptor, size)
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return path


def _number(descriptor: int) -> int | None:
    """Read the number of reserved bytes; None where there is none, as in a new cache."""
    text = os.pread(descriptor, 32, 0)
    return int(text) if text.isdigit() else None


def _set_number(descriptor: int, number: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d" % number, 0)
