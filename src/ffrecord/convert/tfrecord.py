"""TFRecord files: the payloads are the records, as they are (serialized tf.train.Example or other).

The framing (tensorflow.org/tutorials/load_data/tfrecord, section "TFRecords format details"), all
little-endian: u64 length, u32 masked CRC-32C of those 8 bytes, the payload, u32 masked CRC-32C of
the payload. Masked: rotated right by 15 bits, plus a282ead8 (hexadecimal). Keys are not kept:
there is no place for them.
"""

from __future__ import annotations

import gzip
import struct
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from ffrecord.convert.gzipped import create
from ffrecord.convert.model import Counts, Entry, Options, Source, library
from ffrecord.whole import whole_file

_LENGTH = struct.Struct("<Q")
_CHECKSUM = struct.Struct("<I")
_HEAD = _LENGTH.size + _CHECKSUM.size
_GZIP = b"\x1f\x8b"
# Payloads are read in pieces, so that a length of nonsense takes no memory.
_PIECE = 16 << 20


def open_source(path: Path, options: Options) -> Source:
    """Read a file, which may be compressed by gzip; every checksum is compared."""
    return Source(_entries(path, _crc32c()))


def write(path: Path, source: Source, options: Options) -> Counts:
    """Write a file, compressed if its name ends with ".gz"."""
    crc32c = _crc32c()
    count = 0
    with whole_file(path) as work, create(work, path.name.endswith(".gz")) as file:
        for entry in source.entries:
            data = bytes(entry.data)
            length = _LENGTH.pack(len(data))
            file.write(length + _CHECKSUM.pack(_masked(crc32c(length))))
            file.write(data)
            file.write(_CHECKSUM.pack(_masked(crc32c(data))))
            count += 1
    return Counts(count)


def _entries(path: Path, crc32c: Callable[[bytes], int]) -> Iterator[Entry]:
    position = 0
    try:
        with _open(path, crc32c) as file:
            while head := file.read(_HEAD):
                where = f"{path}, record at byte {position}"
                length = _LENGTH.unpack(head[:8])[0] if len(head) == _HEAD else 0
                if len(head) < _HEAD:
                    raise ValueError(f"{where}: the file is cut short")
                _compare(crc32c(head[:8]), head[8:], f"{where}: no TFRecord file, or damaged")
                data = _read(file, length)
                checksum = file.read(4)
                if len(data) < length or len(checksum) < 4:
                    raise ValueError(f"{where}: the file is cut short")
                _compare(crc32c(data), checksum, f"{where}: damaged")
                yield Entry(data)
                position += _HEAD + length + 4
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: the compressed file is damaged or cut short: {error}") from error


def _open(path: Path, crc32c: Callable[[bytes], int]) -> BinaryIO:
    """Open a file, through gzip where its first bytes are no length with its checksum."""
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    plain = len(head) == _HEAD and _masked(crc32c(head[:8])) == _CHECKSUM.unpack(head[8:])[0]
    if not plain and head.startswith(_GZIP):
        return gzip.open(path, "rb")  # type: ignore[return-value]
    return open(path, "rb")


def _read(file: BinaryIO, length: int) -> bytes:
    pieces = []
    while length:
        piece = file.read(min(_PIECE, length))
        if not piece:
            break
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)


def _compare(found: int, stored: bytes, what: str) -> None:
    (expected,) = _CHECKSUM.unpack(stored)
    if _masked(found) != expected:
        raise ValueError(
            f"{what}: expected checksum {expected:#010x}, found {_masked(found):#010x}"
        )


def _masked(checksum: int) -> int:
    return ((checksum >> 15 | checksum << 17) + 0xA282EAD8) & 0xFFFFFFFF


def _crc32c() -> Callable[[bytes], int]:
    found: Callable[[bytes], int] = library("google_crc32c", "google-crc32c", "TFRecord").value
    return found
