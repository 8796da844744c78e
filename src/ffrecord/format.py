"""The bytes of a record file; no other module knows them.

All numbers are little-endian, nothing is padded. With N records:

    byte 0          u32      CRC-32 of bytes 4 to 12 + 12 N; 0: an old file, not checked
    byte 4          i64      N
    byte 12         N x u32  CRC-32 of each record's bytes
    byte 12 + 4 N   N x i64  offset of each record from the start of the file
    byte 12 + 12 N           the records, back to back

Record i ends where record i + 1 starts; the last one ends with the file. The first may start later
than byte 12 + 12 N: what stands in that gap belongs to no record (see `extension`). CRC-32 is
zlib's. A file without records ends with its header, or with an extension block.

A header is read in pieces and checked before anything is allocated for it, so that a file of
nonsense costs no memory and is refused in words.
"""

from __future__ import annotations

import struct
import warnings
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffrecord.errors import HeaderError, RecordWarning
from ffrecord.extension import MAGIC as EXTENSION_MAGIC
from ffrecord.handle import Handle, pread, size_of

SUFFIX = ".ffr"

CHECKSUM = struct.Struct("<I")
COUNT = struct.Struct("<q")
CHECKSUM_DTYPE = np.dtype("<u4")
OFFSET_DTYPE = np.dtype("<i8")
FIXED = CHECKSUM.size + COUNT.size
"""Bytes before the tables."""
ENTRY = CHECKSUM_DTYPE.itemsize + OFFSET_DTYPE.itemsize
"""Bytes of both tables for one record."""

# Bytes of a table read at a time; a multiple of both item sizes.
_PIECE = 1 << 20


class Header(NamedTuple):
    """What is known of a file whose header has been checked.

    Attributes:
        n: The number of records.
        size: The file's size in bytes; the last record ends there.
        start: The first byte of record 0; the file's size where there are no records.
        checksum: The header's checksum as stored; 0 in old files.
    """

    n: int
    size: int
    start: int
    checksum: int


def tables_end(n: int) -> int:
    """Return the first byte after the tables of `n` records."""
    return FIXED + ENTRY * n


def encode_header(checksums: NDArray[np.uint32], lengths: NDArray[np.int64], start: int) -> bytes:
    """Return the header of a file of records with these checksums and lengths.

    Args:
        checksums: The CRC-32 of each record, shape (n,).
        lengths: The size of each record in bytes, shape (n,).
        start: The first byte of record 0.
    """
    n = len(checksums)
    offsets = np.empty(n, OFFSET_DTYPE)
    if n:
        offsets[0] = start
        np.cumsum(lengths[:-1], out=offsets[1:])
        offsets[1:] += start
    body = COUNT.pack(n) + checksums.astype(CHECKSUM_DTYPE).tobytes() + offsets.tobytes()
    return CHECKSUM.pack(zlib.crc32(body)) + body


def read_header(handle: Handle, path: str, *, check_data: bool) -> Header:
    """Read and check a file's header.

    Args:
        handle: The file; a descriptor is open for reading, its position is not used.
        path: The file's name, for messages.
        check_data: Also compare the header's checksum.

    Raises:
        HeaderError: The file is shorter than its header says, its offsets go back or beyond its
            end, or the checksum does not match.
    """
    size = size_of(handle)
    if size is None:
        raise HeaderError(f"{path} is not a regular file", path=path)
    if size < FIXED:
        raise HeaderError(
            f"{path} is no record file: it has {size} bytes, the shortest has {FIXED}", path=path
        )
    fixed = _read(handle, path, 0, FIXED)
    (stored,) = CHECKSUM.unpack_from(fixed, 0)
    (n,) = COUNT.unpack_from(fixed, CHECKSUM.size)
    if not 0 <= n <= (size - FIXED) // ENTRY:
        raise HeaderError(
            f"{path} is no record file or is cut short: it claims {n} records, whose tables do "
            f"not fit its {size} bytes",
            path=path,
        )
    found = zlib.crc32(fixed[CHECKSUM.size :])
    checksums_end = FIXED + CHECKSUM_DTYPE.itemsize * n
    if check_data:
        for at in range(FIXED, checksums_end, _PIECE):
            piece = _read(handle, path, at, min(_PIECE, checksums_end - at))
            found = zlib.crc32(piece, found)
    start, found = _check_offsets(handle, path, n, size, found)
    if check_data and stored == 0:
        warnings.warn(
            f"{path} is of an old version: its header has no checksum and is not checked",
            RecordWarning,
            stacklevel=2,
        )
    elif check_data and found != stored:
        raise HeaderError(
            f"{path} has a damaged header: expected checksum {stored:#010x}, found {found:#010x}",
            path=path,
        )
    return Header(n, size, start, stored)


def _check_offsets(handle: Handle, path: str, n: int, size: int, checksum: int) -> tuple[int, int]:
    """Check that offsets lie in the file and never go back.

    Returns:
        The first byte of record 0, and `checksum` continued over the table.
    """
    if n == 0:
        if size != FIXED and not pread(handle, 8, FIXED).startswith(EXTENSION_MAGIC):
            raise HeaderError(
                f"{path} claims to be empty, but has {size - FIXED} bytes after its header: "
                "its writer was stopped, or it is no record file",
                path=path,
            )
        return size, checksum
    table = FIXED + CHECKSUM_DTYPE.itemsize * n
    end = tables_end(n)
    start, previous, index = -1, end, 0
    for at in range(table, end, _PIECE):
        piece = _read(handle, path, at, min(_PIECE, end - at))
        checksum = zlib.crc32(piece, checksum)
        offsets = np.frombuffer(piece, OFFSET_DTYPE)
        if start < 0:
            start = int(offsets[0])
        wrong = np.flatnonzero(offsets[1:] < offsets[:-1]) + 1
        if offsets[0] < previous:
            wrong = np.zeros(1, np.int64)
        if len(wrong):
            bad = int(wrong[0])
            before = int(offsets[bad - 1]) if bad else previous
            raise HeaderError(
                f"{path} has a damaged header: record {index + bad} starts at byte "
                f"{int(offsets[bad])}, before byte {before}, where the one before it starts or the "
                "header ends",
                path=path,
            )
        previous = int(offsets[-1])
        index += len(offsets)
    if previous > size:
        raise HeaderError(
            f"{path} is cut short: its last record starts at byte {previous} of {size}", path=path
        )
    return start, checksum


def read_offsets(
    handle: Handle, path: str, header: Header, first: int, last: int
) -> NDArray[np.int64]:
    """Read offsets `first` to `last` (exclusive); the one numbered n is the file's size.

    Raises:
        HeaderError: The file has become shorter, or its offsets make no sense any more.
    """
    n = header.n
    table = FIXED + CHECKSUM_DTYPE.itemsize * n
    stop = min(last, n)
    offsets = np.empty(last - first, np.int64)
    raw = _read(
        handle,
        path,
        table + OFFSET_DTYPE.itemsize * first,
        OFFSET_DTYPE.itemsize * (stop - first),
    )
    offsets[: stop - first] = np.frombuffer(raw, OFFSET_DTYPE)
    if last > n:
        offsets[-1] = header.size
    # The table was checked when the file was opened; it is read again, so it is checked again.
    if len(offsets) and (
        offsets[0] < header.start
        or offsets[-1] > header.size
        or bool((offsets[1:] < offsets[:-1]).any())
    ):
        raise HeaderError(f"the offsets in {path} changed after it was opened", path=path)
    return offsets


def read_checksums(
    handle: Handle, path: str, header: Header, first: int, last: int
) -> NDArray[np.uint32]:
    """Read the checksums of records `first` to `last` (exclusive).

    Raises:
        HeaderError: The file has become shorter.
    """
    item = CHECKSUM_DTYPE.itemsize
    raw = _read(handle, path, FIXED + item * first, item * (last - first))
    return np.frombuffer(raw, CHECKSUM_DTYPE).astype(np.uint32)


def _read(handle: Handle, path: str, offset: int, length: int) -> bytes:
    data = pread(handle, length, offset)
    while len(data) < length:
        more = pread(handle, length - len(data), offset + len(data))
        if not more:
            raise HeaderError(
                f"{path} is cut short: it ends at byte {offset + len(data)}, in its header",
                path=path,
            )
        data += more
    return data
