"""Headers that make no sense are refused; a fuzzer finds neither a crash nor wrong data."""

from __future__ import annotations

import os
import random
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest

from ffrecord import DamagedFileError, FileReader, HeaderError
from tests.ffrecord.independent import file_of

RECORDS = [b"first", b"", b"third" * 30]
# Cases of the fuzzer; the environment asks for more.
CASES = int(os.environ.get("FFRECORD_FUZZ_CASES", "3000"))


def patched(raw: bytes, at: int, value: bytes) -> bytes:
    return raw[:at] + value + raw[at + len(value) :]


GOOD = file_of(RECORDS)
NONSENSE = {
    "nothing": b"",
    "short": GOOD[:11],
    "text": b"This is a plain text file, not a record file at all.\n" * 3,
    "zeros": bytes(4096),
    "empty with data": bytes(12) + b"x",
    "negative n": patched(GOOD, 4, struct.pack("<q", -1)),
    "huge n": patched(GOOD, 4, struct.pack("<q", 2**62)),
    "n beyond the size": patched(GOOD, 4, struct.pack("<q", 100)),
    "cut checksums": GOOD[:20],
    "cut offsets": GOOD[:40],
    "offset in the header": patched(GOOD, 24, struct.pack("<q", 12)),
    "negative offset": patched(GOOD, 24, struct.pack("<q", -(2**63))),
    "offset going back": patched(GOOD, 40, struct.pack("<q", 50)),
    "offset beyond the end": patched(GOOD, 40, struct.pack("<q", len(GOOD) + 1)),
    "huge offset": patched(GOOD, 40, struct.pack("<q", 2**63 - 1)),
}


@pytest.mark.parametrize("check_data", [True, False])
@pytest.mark.parametrize("name", NONSENSE)
@pytest.mark.filterwarnings("ignore::ffrecord.RecordWarning")
def test_nonsense_is_refused_at_open(name: str, check_data: bool, tmp_path: Path) -> None:
    (tmp_path / "bad.ffr").write_bytes(NONSENSE[name])
    with pytest.raises(HeaderError, match=r"bad\.ffr"):
        FileReader(tmp_path / "bad.ffr", check_data)


def test_a_header_longer_than_one_piece_is_checked_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "long.ffr"
    n = 300_000
    raw = bytearray(file_of([b"x"] * n))
    path.write_bytes(raw)
    reader = FileReader(path)
    assert reader.read([0, n - 1])[1].tobytes() == b"x"
    assert len(reader.get_offsets(0)) == n + 1
    struct.pack_into("<q", raw, 12 + 4 * n + 8 * (n - 1), 0)
    path.write_bytes(raw)
    with pytest.raises(HeaderError, match=f"record {n - 1} starts at byte 0"):
        FileReader(path, check_data=False)


def test_a_flipped_bit_anywhere_is_never_read_as_data(tmp_path: Path) -> None:
    path = tmp_path / "a.ffr"
    for bit in range(8 * len(GOOD)):
        raw = bytearray(GOOD)
        raw[bit // 8] ^= 1 << bit % 8
        path.write_bytes(raw)
        with pytest.raises(DamagedFileError):
            FileReader(path).validate(deep=True)


def test_fuzzed_files_are_refused_or_read_within_their_bounds(tmp_path: Path) -> None:
    seed = int(os.environ.get("FFRECORD_FUZZ_SEED", random.randrange(2**32)))
    source = random.Random(seed)
    path = tmp_path / "fuzz.ffr"
    specials = [0, 1, -1, 12, 48, len(GOOD), 2**31, 2**32, 2**61, 2**63 - 1, -(2**63)]
    for case in range(CASES):
        raw = bytearray(file_of(RECORDS, gap=source.choice([0, 0, 7, 4048])))
        for _ in range(source.randint(1, 3)):
            at = source.randrange(min(len(raw), 60))
            kind = source.randrange(4)
            if kind == 0:
                raw[at] = source.randrange(256)
            elif kind == 1:
                value = source.choice(specials)
                raw[4 + 8 * (at // 8) : 12 + 8 * (at // 8)] = struct.pack("<q", value)
            elif kind == 2:
                del raw[source.randrange(len(raw)) :]
                raw += bytes(12)
            else:
                raw[at:at] = source.randbytes(source.randrange(9))
        path.write_bytes(raw)
        for check_data in (False, True):
            for tables in ("memory", "demand"):
                try:
                    with warnings.catch_warnings():
                        warnings.simplefilter("ignore")
                        reader = FileReader(path, check_data, tables=tables)  # type: ignore[arg-type]
                    offsets = reader.get_offsets(0)
                    batch = reader.read(range(reader.n))
                except DamagedFileError:
                    continue
                assert reader.n * 12 <= len(raw), f"seed {seed}, case {case}"
                for record, (start, end) in zip(
                    batch, np.stack([offsets[:-1], offsets[1:]], 1).tolist(), strict=True
                ):
                    assert record.tobytes() == raw[start:end], f"seed {seed}, case {case}"
