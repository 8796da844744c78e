"""The bytes of the extension block, which stands between the tables and record 0.

The original's reader takes record 0 from the offset table and never looks there. All numbers are
little-endian; B is byte 12 + 12 N, where the tables end.

    B        8 bytes  magic: 89 "FFREXT" 0A (hexadecimal at both ends)
    B + 8    u32      version: 1
    B + 12   u32      critical flags: a reader that does not know one refuses the file; none so far
    B + 16   u32      other flags: a reader may ignore those it does not know; none so far
    B + 20   u32      CRC-32 of the block, this field taken as 0
    B + 24   u64      length L of the block, these 64 bytes included
    B + 32   u64      start of the JSON text, counted from B
    B + 40   u64      its length in bytes
    B + 48   u64      start of the key index, counted from B; 0: there is none
    B + 56   u64      its length in bytes
    B + 64            the JSON text, the key index
    B + L             zeros up to record 0, which starts at a multiple of 4096

The JSON text (UTF-8) is an object with the members "metadata" and "schema", each an object or null.
The key index of K keys, sorted by their UTF-8 bytes and all different:

    0            u64            K
    8            (K + 1) x u64  where each key starts, counted from the end of the next table;
                                the last is where the last key ends
    16 + 8 K     K x u64        the record of each key
    16 + 16 K                   the keys, back to back
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffrecord.errors import HeaderError
from ffrecord.handle import Handle, pread

MAGIC = b"\x89FFREXT\n"
VERSION = 1
KNOWN_CRITICAL_FLAGS = 0
ALIGNMENT = 4096

_HEAD = struct.Struct("<8sIIIIQQQQQ")
_CHECKSUM_AT = 20
_NUMBER = np.dtype("<u8")
_PIECE = 1 << 20


class Extension(NamedTuple):
    """Where the parts of a checked block lie in its file.

    Attributes:
        text: Offset and length of the JSON text.
        keys: Offset and length of the key index; the length is 0 where there is none.
    """

    text: tuple[int, int]
    keys: tuple[int, int]


class KeyIndex:
    """Keys of a file's records, found by halving.

    Args:
        raw: The bytes of the index.
        n: The number of records in the file.
        path: The file, for messages.

    Raises:
        HeaderError: The index makes no sense.
    """

    def __init__(self, raw: bytes, n: int, path: str) -> None:
        self._path = path
        count = int.from_bytes(raw[:8], "little")
        head = 16 + 16 * count
        if len(raw) < 8 or head > len(raw):
            raise HeaderError(f"the key index of {path} is cut short", path=path)
        self._starts: NDArray[np.uint64] = np.frombuffer(raw, _NUMBER, count + 1, 8)
        self._records: NDArray[np.uint64] = np.frombuffer(raw, _NUMBER, count, 16 + 8 * count)
        self._names = raw[head:]
        wrong = (
            self._starts[0] != 0
            or self._starts[-1] != len(self._names)
            or bool((self._starts[1:] < self._starts[:-1]).any())
            or bool((self._records >= n).any())
        )
        if wrong:
            raise HeaderError(f"the key index of {path} makes no sense", path=path)

    def __len__(self) -> int:
        return len(self._records)

    def key(self, number: int) -> str:
        """Return the key of this number in the order of bytes.

        Raises:
            HeaderError: It is no UTF-8.
        """
        try:
            return self._bytes(number).decode()
        except UnicodeDecodeError:
            raise HeaderError(
                f"key {number} of {self._path} is no UTF-8", path=self._path
            ) from None

    def record(self, number: int) -> int:
        """Return the record of the key of this number in the order of bytes."""
        return int(self._records[number])

    def find(self, key: str) -> int | None:
        """Return the record of a key, or None."""
        wanted, low, high = key.encode(), 0, len(self)
        while low < high:
            middle = (low + high) // 2
            if self._bytes(middle) < wanted:
                low = middle + 1
            else:
                high = middle
        found = low < len(self) and self._bytes(low) == wanted
        return int(self._records[low]) if found else None

    def _bytes(self, number: int) -> bytes:
        return self._names[int(self._starts[number]) : int(self._starts[number + 1])]


def encode(
    metadata: Mapping[str, Any] | None,
    schema: Mapping[str, Any] | None,
    keys: Mapping[str, int],
) -> bytes:
    """Return a block.

    Args:
        metadata: Anything JSON can say.
        schema: The same, about the records.
        keys: The record of each key.
    """
    text = json.dumps(
        {"metadata": metadata, "schema": schema}, ensure_ascii=False, allow_nan=False
    ).encode()
    index = _encode_keys(keys) if keys else b""
    index_at = _HEAD.size + len(text) if keys else 0
    length = _HEAD.size + len(text) + len(index)
    places = (length, _HEAD.size, len(text), index_at, len(index))
    rest = text + index
    checksum = zlib.crc32(rest, zlib.crc32(_HEAD.pack(MAGIC, VERSION, 0, 0, 0, *places)))
    return _HEAD.pack(MAGIC, VERSION, 0, 0, checksum, *places) + rest


def _encode_keys(keys: Mapping[str, int]) -> bytes:
    rows = sorted((key.encode(), record) for key, record in keys.items())
    starts = np.zeros(len(rows) + 1, _NUMBER)
    np.cumsum([len(name) for name, _ in rows], out=starts[1:])
    records = np.array([record for _, record in rows], _NUMBER)
    names = b"".join(name for name, _ in rows)
    return len(rows).to_bytes(8, "little") + starts.tobytes() + records.tobytes() + names


def find(handle: Handle, path: str, begin: int, end: int, *, check_data: bool) -> Extension | None:
    """Look for a block in a file's gap, and check it.

    Args:
        handle: The file; a descriptor is open for reading.
        path: Its name, for messages.
        begin: Where the tables end.
        end: Where record 0 starts, or the file ends.
        check_data: Compare the block's checksum.

    Returns:
        The block, or None where the gap is too small or something else stands in it.

    Raises:
        HeaderError: The block is damaged, or needs a newer reader.
    """
    if end - begin < _HEAD.size:
        return None
    head = pread(handle, _HEAD.size, begin)
    if len(head) < _HEAD.size or not head.startswith(MAGIC):
        return None
    _, version, critical, _, stored, length, text_at, text, keys_at, keys = _HEAD.unpack(head)
    unknown = critical & ~KNOWN_CRITICAL_FLAGS
    if version != VERSION or unknown:
        what = f"version {version}" if version != VERSION else f"critical flags {unknown:#x}"
        raise HeaderError(
            f"{path} has an extension block of {what}, which this ffrecord does not know: "
            "read it with a newer one",
            path=path,
        )
    inside = all(
        at >= _HEAD.size and size <= length - at
        for at, size in ((text_at, text), (keys_at, keys))
        if (at, size) != (0, 0)
    )
    if not _HEAD.size <= length <= end - begin or not inside or not text_at:
        raise HeaderError(f"the extension block of {path} does not fit its gap", path=path)
    if check_data:
        zeroed = head[:_CHECKSUM_AT] + bytes(4) + head[_CHECKSUM_AT + 4 :]
        found = zlib.crc32(zeroed)
        for at in range(_HEAD.size, length, _PIECE):
            found = zlib.crc32(pread(handle, min(_PIECE, length - at), begin + at), found)
        if found != stored:
            raise HeaderError(
                f"{path} has a damaged extension block: expected checksum {stored:#010x}, "
                f"found {found:#010x}",
                path=path,
            )
    return Extension((begin + text_at, text), (begin + keys_at, keys))


def read_text(handle: Handle, path: str, extension: Extension) -> dict[str, Any]:
    """Read the members "metadata" and "schema".

    Raises:
        HeaderError: The text is no such JSON.
    """
    offset, length = extension.text
    try:
        loaded = json.loads(pread(handle, length, offset))
    except (ValueError, RecursionError) as error:
        raise HeaderError(f"the metadata of {path} are no JSON: {error}", path=path) from error
    if not isinstance(loaded, dict):
        raise HeaderError(f"the metadata of {path} are no JSON object", path=path)
    return loaded


def read_keys(handle: Handle, path: str, extension: Extension, n: int) -> KeyIndex:
    """Read the key index; it has no keys where the block has none.

    Raises:
        HeaderError: The index makes no sense.
    """
    offset, length = extension.keys
    return KeyIndex(pread(handle, length, offset) if length else bytes(16), n, path)


def padded(block: bytes, begin: int) -> bytes:
    """Return a block with zeros after it, so that what follows starts at a multiple of 4096."""
    end = begin + len(block)
    return block + bytes(-end % ALIGNMENT)
