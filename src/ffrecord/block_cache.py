"""Blocks of remote objects on a local disk, shared by the processes of a machine.

A block is a file, `XX/<digest>-<number>`: its bytes, then their CRC-32. The digest is of the
object's URL and version, so an object that was written again has other blocks. A block gets its
name when it is whole; one that is not (a full disk, a crash) fails its checksum and is fetched
again. Removing one does not disturb whoever has it open, so nobody counts readers.

What all blocks take is kept below the bound by a number in the file `bytes`, changed under a lock:
room is reserved before a block is written. A process that dies in between leaves the number too
high, which the next clearing, which counts, puts right.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
import tempfile
import time
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
        self.directory.mkdir(parents=True, exist_ok=True)
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
            self._drop(path)
            return None
        if time.time() - used > _FRESH:
            with contextlib.suppress(OSError):
                os.utime(path)
        return block

    def put(self, url: str, version: str, number: int, block: bytes) -> None:
        """Keep a block; where there is no room for it on the disk, do not."""
        path = self._path(url, version, number)
        size = len(block) + _CHECKSUM
        if path.exists():
            return
        try:
            temporary = self._make(path.parent, size)
            try:
                with open(temporary, "r+b") as file:
                    file.write(block)
                    file.write(zlib.crc32(block).to_bytes(_CHECKSUM, "little"))
                # A link does not replace: of two that write a block, the second finds it there.
                os.link(temporary, path)
            finally:
                os.unlink(temporary)
        except FileExistsError:
            self._return(size)
        except OSError as error:
            self._return(size)
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
                raise

    def used(self) -> int:
        """Return the bytes that are reserved for blocks."""
        with self._locked() as file:
            return _number(file)

    def _path(self, url: str, version: str, number: int) -> Path:
        digest = hashlib.sha256(f"{url}\0{version}\0{BLOCK}".encode()).hexdigest()[:32]
        return self.directory / digest[:2] / f"{digest}-{number}"

    def _make(self, folder: Path, size: int) -> str:
        """Reserve room and make the file that takes it; whoever clears meanwhile counts it."""
        with self._locked() as file:
            total = _number(file) + size
            if total > self.most:
                total = self._clear(int(self.most * _LEFT_AFTER_CLEARING) - size) + size
            _set_number(file, total)
            folder.mkdir(exist_ok=True)
            descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=".new-")
            os.ftruncate(descriptor, size)
            os.close(descriptor)
            return temporary

    def _return(self, size: int) -> None:
        """Give back room of a block that is not there."""
        with self._locked() as file:
            _set_number(file, max(_number(file) - size, 0))

    def _drop(self, path: Path) -> None:
        with contextlib.suppress(OSError):
            size = path.stat().st_size
            path.unlink()
            self._return(size)

    def _clear(self, most: int) -> int:
        """Remove the blocks that were not used for the longest time; return what is left."""
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
            if left <= most:
                break
            if not os.path.basename(path).startswith(".new-"):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                left -= size
        return left

    @contextlib.contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self.directory / "bytes", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)


def _number(descriptor: int) -> int:
    try:
        return int(os.pread(descriptor, 32, 0) or b"0")
    except ValueError:
        return 0


def _set_number(descriptor: int, number: int) -> None:
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"%d" % number, 0)
