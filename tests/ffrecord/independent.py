"""A reader and a writer of record files made from the description alone, with `struct` and zlib.

They share nothing with the package, so that the two can be held against each other.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path


def read_file(path: Path) -> list[bytes]:
    raw = path.read_bytes()
    header_crc, n = struct.unpack_from("<Iq", raw)
    crcs = struct.unpack_from(f"<{n}I", raw, 12)
    offsets = [*struct.unpack_from(f"<{n}q", raw, 12 + 4 * n), len(raw)]
    assert header_crc == zlib.crc32(raw[4 : 12 + 12 * n])
    records = [raw[offsets[i] : offsets[i + 1]] for i in range(n)]
    assert [zlib.crc32(record) for record in records] == list(crcs)
    return records


def file_of(records: list[bytes], gap: int = 0, checksum: bool = True) -> bytes:
    """The bytes of a file of these records, `gap` zeros between its tables and record 0."""
    n = len(records)
    at = 12 + 12 * n + gap
    offsets = []
    for record in records:
        offsets.append(at)
        at += len(record)
    body = struct.pack(f"<q{n}I{n}q", n, *(zlib.crc32(record) for record in records), *offsets)
    header = struct.pack("<I", zlib.crc32(body) if checksum else 0) + body
    return header + bytes(gap) + b"".join(records)
