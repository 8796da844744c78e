"""Writes a record file that is either whole under its name, or not there.

Bytes go to a temporary file in the same directory, whose name no reader takes for a record file;
`close` writes the header, flushes to the disk, renames, and flushes the directory. Without a
promised number of records, or with an extension block, they go to an unnamed second file first,
because the size of what stands before them is known only at the end.

Writes carry their position, so a forked child that holds a copy of a writer cannot disturb it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import tempfile
import zlib
from array import array
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ffrecord import extension
from ffrecord import format as ffr

if TYPE_CHECKING:
    from typing_extensions import Buffer, Self

# numpy's stubs say that arrays are buffers only for Python 3.12 and later.
BufferLike: TypeAlias = "Buffer | NDArray[Any]"

_BUFFER = 1 << 20
# What says that a directory cannot be flushed, and not that flushing it failed.
_NO_FLUSHING = {
    errno.EACCES,
    errno.EBADF,
    errno.EINVAL,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EPERM,
    errno.EROFS,
}


class FileWriter:
    """A writer of one record file.

    Leaving the `with` block by an exception, or with fewer records than promised, leaves no file
    under the name and whatever was there before untouched.

    Args:
        fname: The file; its name ends with `.ffr`. An existing file is replaced at `close`.
        n: The number of records that will be written; None where it is not known yet, which costs
            a second copy of the data at `close`.
        aligned: Start record 0 at a multiple of 4096, with an extension block before it, which the
            original's reader skips. The items below and keys have it, too.
        metadata: Stored in the extension block, as JSON.
        schema: The same, for what describes the records.

    Attributes:
        n: The promised number of records, or None.
        count: How many have been written.

    Raises:
        ValueError: The name does not end with `.ffr`, or `n` is negative.
        OSError: The directory cannot be written to.
    """

    def __init__(
        self,
        fname: str | os.PathLike[str],
        n: int | None = None,
        *,
        aligned: bool = False,
        metadata: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        self._descriptor = -1
        self.path = Path(fname)
        if self.path.suffix != ffr.SUFFIX:
            raise ValueError(f"{self.path}: the name of a record file ends with {ffr.SUFFIX}")
        if n is not None and n < 0:
            raise ValueError(f"n is {n}: a file holds 0 records or more")
        if self.path.is_dir():
            raise IsADirectoryError(f"{self.path} is a directory: give the name of a file")
        self.n = n
        self.count = 0
        self._metadata, self._schema = metadata, schema
        self._keys: dict[str, int] = {}
        self._extended = aligned or metadata is not None or schema is not None
        if self._extended:
            extension.encode(metadata, schema, {})  # what JSON cannot say is refused now
        self._checksums = array("I")
        self._lengths = array("q")
        self._buffer = bytearray()
        self._process = os.getpid()
        self._failure: str | None = None
        self._temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(6)}.tmp")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._descriptor = os.open(self._temporary, flags, 0o666)
        except OSError as error:
            raise named_after(error, self.path) from None
        self._spool = self._descriptor
        self._position = 0
        if n is None or self._extended:
            try:
                self._spool = _unnamed_file(self.path.parent)
            except BaseException:
                self._abandon()
                raise
        else:
            self._position = ffr.tables_end(n)

    def write_one(self, buffer: BufferLike, key: str | None = None) -> None:
        """Append one record: the bytes of anything with the buffer protocol.

        An array is written in C order whatever its strides, with all bytes of its items.

        Args:
            buffer: The record.
            key: A name to find it by (`FileReader.index_of`), different from all others in the
                file.

        Raises:
            TypeError: No buffer, or one of Python objects.
            ValueError: The writer is closed, or has all records it was promised; the key is taken,
                or the file has no room for keys.
            OSError: It could not be written, now or before; the writer has given up then.
        """
        self._need_open()
        if self.n is not None and self.count >= self.n:
            raise ValueError(f"{self.path} was promised {self.n} records and has them all")
        if key is not None:
            self._check_key(key)
        data = flat(buffer)
        checksum = zlib.crc32(data)
        if len(data) >= _BUFFER:
            self._flush()
            self._write(data)
        else:
            self._buffer += data
            if len(self._buffer) >= _BUFFER:
                self._flush()
        self._checksums.append(checksum)
        self._lengths.append(len(data))
        if key is not None:
            self._keys[key] = self.count
            self._extended = True
        self.count += 1

    def write(self, buffers: Iterable[BufferLike]) -> None:
        """Append many records, one for each buffer."""
        for buffer in buffers:
            self.write_one(buffer)

    def close(self) -> None:
        """Complete the file and give it its name; a second call does nothing.

        Raises:
            ValueError: Fewer records than promised; there is no file then.
            OSError: The file could not be completed, or a write failed before; there is no file
                then. Or the disk failed when the directory was flushed: then there is.
        """
        self._need_success()
        if self._descriptor < 0:
            return
        self._need_open()
        try:
            if self.n is not None and self.count < self.n:
                raise ValueError(
                    f"{self.path} was promised {self.n} records and got {self.count}: not written. "
                    "Leave out n where the number is not known"
                )
            self._complete()
            os.replace(self._temporary, self.path)
        except BaseException as error:
            self._give_up(error)
            raise
        self._release()
        flush_directory(self.path.parent)

    def abort(self) -> None:
        """Give up: no file is left; a closed writer is left alone."""
        if self._descriptor >= 0:
            self._abandon()

    @property
    def has_failed(self) -> bool:
        """Whether a write failed, so that there will be no file."""
        return self._failure is not None

    def _complete(self) -> None:
        self._flush()
        checksums = np.frombuffer(self._checksums, np.uint32)
        lengths = np.frombuffer(self._lengths, np.int64)
        begin = ffr.tables_end(self.count)
        block = b""
        if self._extended:
            block = extension.encode(self._metadata, self._schema, self._keys)
            block = extension.padded(block, begin)
        start = begin + len(block)
        if self._spool != self._descriptor:
            _copy(self._spool, self._descriptor, int(lengths.sum()), start)
        _write_all(self._descriptor, ffr.encode_header(checksums, lengths, start) + block, 0)
        os.fsync(self._descriptor)

    def _flush(self) -> None:
        if self._buffer:
            self._write(self._buffer)
            self._buffer = bytearray()

    def _write(self, data: Buffer) -> None:
        # After a failed write (a full disk) the position is unknown, so the writer gives up.
        try:
            self._position += _write_all(self._spool, data, self._position)
        except BaseException as error:
            self._give_up(error)
            raise

    def _check_key(self, key: str) -> None:
        if key in self._keys:
            raise ValueError(f"the key {key!r} is taken by record {self._keys[key]}")
        if self._spool == self._descriptor:
            raise ValueError(
                f"{self.path} was begun without room for keys: leave out n, or give aligned=True"
            )
        key.encode()  # a lone surrogate is refused here, not at close

    def _need_success(self) -> None:
        if self._failure is not None:
            raise OSError(f"the writer of {self.path} gave up after: {self._failure}")

    def _need_open(self) -> None:
        self._need_success()
        if self._descriptor < 0:
            raise ValueError(f"the writer of {self.path} is closed")
        if os.getpid() != self._process:
            raise ValueError(f"the writer of {self.path} belongs to another process: open one here")

    def _give_up(self, error: BaseException) -> None:
        """Leave no file, and say so whenever the writer is used again."""
        self._failure = str(error) or type(error).__name__
        self._abandon()

    def _abandon(self) -> None:
        if os.getpid() == self._process:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)
        self._release()

    def _release(self) -> None:
        for descriptor in {self._descriptor, self._spool}:
            with contextlib.suppress(OSError):
                os.close(descriptor)
        self._descriptor = self._spool = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.abort()

    def __del__(self) -> None:
        if getattr(self, "_descriptor", -1) >= 0:
            self._abandon()


def flush_directory(directory: Path) -> None:
    """Flush a directory's entries to the disk, so that a rename in it outlives a power cut.

    One that may not be read, or is on a file system that does not flush directories, is left alone:
    what was renamed in it is there all the same.

    Raises:
        OSError: The disk failed.
    """
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in _NO_FLUSHING:
            raise


def named_after(error: OSError, path: Path) -> OSError:
    """Return an error of a temporary file as one of the file that was asked for."""
    return OSError(error.errno, error.strerror, str(path))


def as_view(buffer: BufferLike) -> memoryview:
    """Return a record's buffer as a memoryview.

    Raises:
        TypeError: It is none.
    """
    if isinstance(buffer, np.ndarray) and buffer.dtype.kind in "mM":
        buffer = buffer.view(np.int64)  # times are no buffers, for want of a letter for them
    try:
        return memoryview(cast("Buffer", buffer))
    except (TypeError, ValueError, BufferError):
        raise TypeError(
            f"a record is anything with the buffer protocol (bytes, an array), "
            f"not {_kind(buffer)}: encode it first"
        ) from None


def _kind(buffer: object) -> str:
    of = f" of {buffer.dtype}" if isinstance(buffer, np.ndarray) else ""
    return type(buffer).__name__ + of


def flat(buffer: BufferLike) -> memoryview | bytes:
    """Return a buffer's items in C order as one row of bytes, without a copy where possible."""
    view = as_view(buffer)
    if view.format == "B" and view.ndim == 1 and view.c_contiguous:
        return view
    if np.asarray(view).dtype.hasobject:
        raise TypeError("an array of Python objects holds no bytes: encode its items first")
    if view.nbytes == 0:
        return b""
    if not view.c_contiguous:
        return view.tobytes()
    return np.frombuffer(view, np.uint8).data


def _unnamed_file(directory: Path) -> int:
    """Open a file that vanishes with its descriptor, on the file system of `directory`."""
    with tempfile.TemporaryFile(dir=directory) as file:
        return os.dup(file.fileno())


def _write_all(descriptor: int, data: Buffer, position: int) -> int:
    view = memoryview(data)
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done:], position + done)
    return done


def _copy(source: int, target: int, length: int, position: int) -> None:
    """Copy the first `length` bytes of `source` to `position` of `target`."""
    done = 0
    # Not every kernel and file system copies; what was copied stands.
    with contextlib.suppress(AttributeError, OSError):
        while done < length:
            copied = os.copy_file_range(source, target, length - done, done, position + done)
            if copied == 0:
                break
            done += copied
    while done < length:
        data = os.pread(source, min(_BUFFER, length - done), done)
        if not data:
            raise OSError("the unnamed file of a writer lost its end")
        done += _write_all(target, data, position + done)
