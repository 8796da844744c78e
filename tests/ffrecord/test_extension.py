"""The extension block: found, checked, and skipped by readers that do not know it."""

from __future__ import annotations

import json
import os
import random
import struct
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffrecord import DamagedFileError, FileReader, FileWriter, HeaderError
from tests.ffrecord.independent import file_of, read_file

METADATA = {"name": "Fünf", "classes": ["a", "b"], "none": None}
CASES = int(os.environ.get("FFRECORD_FUZZ_CASES", "2000"))


def block_of(raw: bytes) -> tuple[dict[str, Any], dict[str, int]]:
    """JSON and keys of a file's block, from the description alone."""
    (n,) = struct.unpack_from("<q", raw, 4)
    at = 12 + 12 * n
    magic, version, critical, flags, checksum, length, text, text_n, keys, keys_n = (
        struct.unpack_from("<8sIIIIQQQQQ", raw, at)
    )
    block = raw[at : at + length]
    assert (magic, version, critical, flags) == (b"\x89FFREXT\n", 1, 0, 0)
    assert checksum == zlib.crc32(block[:20] + bytes(4) + block[24:])
    found = {}
    if keys:
        index = block[keys : keys + keys_n]
        (count,) = struct.unpack_from("<Q", index)
        starts = struct.unpack_from(f"<{count + 1}Q", index, 8)
        records = struct.unpack_from(f"<{count}Q", index, 16 + 8 * count)
        names = index[16 + 16 * count :]
        for k in range(count):
            found[names[starts[k] : starts[k + 1]].decode()] = records[k]
        assert list(found) == sorted(found, key=str.encode)
    return json.loads(block[text : text + text_n]), found


@pytest.fixture
def extended(tmp_path: Path) -> Path:
    with FileWriter(tmp_path / "x.ffr", 3, metadata=METADATA, schema={"type": "jpeg"}) as writer:
        writer.write_one(b"one", key="ä/1")
        writer.write_one(b"")
        writer.write_one(b"three" * 2000, key="b")
    return tmp_path / "x.ffr"


def test_a_reader_that_knows_only_the_tables_skips_the_block(extended: Path) -> None:
    assert read_file(extended) == [b"one", b"", b"three" * 2000]


def test_an_independent_reader_finds_json_and_keys(extended: Path) -> None:
    text, keys = block_of(extended.read_bytes())
    assert text == {"metadata": METADATA, "schema": {"type": "jpeg"}}
    assert keys == {"b": 2, "ä/1": 0}


def test_record_0_is_aligned_and_the_gap_is_zeros(extended: Path) -> None:
    start = int(FileReader(extended).get_offsets(0)[0])
    assert start == 4096
    raw = extended.read_bytes()
    (length,) = struct.unpack_from("<Q", raw, 12 + 36 + 24)
    assert not any(raw[12 + 36 + length : start])


def test_metadata_schema_and_keys_are_read_back(extended: Path) -> None:
    reader = FileReader(extended)
    assert reader.get_metadata(0) == METADATA
    assert reader.get_schema(0) == {"type": "jpeg"}
    assert reader.get_keys(0) == ["b", "ä/1"]
    assert reader.read_one(reader.index_of("ä/1")).tobytes() == b"one"
    assert reader.index_of("b") == 2
    for key in ("", "a", "c", "ä", "ä/1x"):
        with pytest.raises(KeyError, match="no record with the key"):
            reader.index_of(key)


@settings(max_examples=40, deadline=None)
@given(st.dictionaries(st.text(st.characters(exclude_categories=["Cs"])), st.binary(max_size=20)))
def test_any_keys_are_found(
    tmp_path_factory: pytest.TempPathFactory, items: dict[str, bytes]
) -> None:
    path = tmp_path_factory.mktemp("keys") / "k.ffr"
    with FileWriter(path, aligned=True) as writer:
        for key, data in items.items():
            writer.write_one(data, key=key)
    assert block_of(path.read_bytes())[1] == {key: k for k, key in enumerate(items)}
    reader = FileReader([path, path])
    assert {key: reader.read_one(reader.index_of(key)).tobytes() for key in items} == items


def test_a_set_is_searched_part_by_part(extended: Path, tmp_path: Path) -> None:
    (tmp_path / "plain.ffr").write_bytes(file_of([b"x"]))
    with FileWriter(tmp_path / "y.ffr") as writer:
        writer.write_one(b"", key="late")
    reader = FileReader([tmp_path / "plain.ffr", extended, tmp_path / "y.ffr"])
    assert (reader.index_of("ä/1"), reader.index_of("late")) == (1, 4)
    assert reader.get_metadata(0) is None
    assert reader.get_keys(0) == []


def test_a_file_without_records_may_have_metadata(tmp_path: Path) -> None:
    FileWriter(tmp_path / "e.ffr", 0, metadata={"a": 1}).close()
    reader = FileReader(tmp_path / "e.ffr")
    assert (reader.n, reader.get_metadata(0)) == (0, {"a": 1})
    assert read_file(tmp_path / "e.ffr") == []


def test_what_json_cannot_say_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(TypeError):
        FileWriter(tmp_path / "a.ffr", metadata={"a": object()})
    with pytest.raises(ValueError, match="JSON"):
        FileWriter(tmp_path / "a.ffr", metadata={"a": float("nan")})
    assert list(tmp_path.iterdir()) == []


def test_keys_that_cannot_be_are_refused_and_the_writer_goes_on(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer:
        writer.write_one(b"1", key="a")
        with pytest.raises(ValueError, match="taken by record 0"):
            writer.write_one(b"2", key="a")
        with pytest.raises(UnicodeEncodeError):
            writer.write_one(b"2", key="\ud800")
    assert read_file(tmp_path / "a.ffr") == [b"1"]
    with FileWriter(tmp_path / "b.ffr", 1) as writer:
        with pytest.raises(ValueError, match="aligned=True"):
            writer.write_one(b"1", key="a")
        writer.write_one(b"1")


@pytest.mark.parametrize("check_data", [True, False])
@pytest.mark.parametrize(
    ("at", "value", "words"),
    [(8, 2, "version 2"), (12, 0x8001, "critical flags 0x8001"), (24, 2**32 - 1, "does not fit")],
)
def test_a_block_for_newer_readers_is_refused(
    at: int, value: int, words: str, check_data: bool, extended: Path
) -> None:
    raw = bytearray(extended.read_bytes())
    struct.pack_into("<I", raw, 12 + 36 + at, value)
    extended.write_bytes(raw)
    with pytest.raises(HeaderError, match=words):
        FileReader(extended, check_data)


def test_flags_that_are_not_critical_are_ignored(extended: Path) -> None:
    raw = bytearray(extended.read_bytes())
    at = 12 + 36
    struct.pack_into("<I", raw, at + 16, 0xFFFF)
    (length,) = struct.unpack_from("<Q", raw, at + 24)
    struct.pack_into("<I", raw, at + 20, 0)
    struct.pack_into("<I", raw, at + 20, zlib.crc32(raw[at : at + length]))
    extended.write_bytes(raw)
    assert FileReader(extended).get_metadata(0) == METADATA


def test_a_damaged_block_is_refused(extended: Path) -> None:
    raw = bytearray(extended.read_bytes())
    raw[12 + 36 + 70] ^= 1
    extended.write_bytes(raw)
    with pytest.raises(HeaderError, match="damaged extension block: expected checksum"):
        FileReader(extended)


def test_what_else_stands_in_the_gap_is_left_alone(tmp_path: Path) -> None:
    raw = bytearray(file_of([b"x"], gap=100))
    raw[30:40] = b"0123456789"
    (tmp_path / "a.ffr").write_bytes(raw)
    assert FileReader(tmp_path / "a.ffr").get_metadata(0) is None


def test_fuzzed_blocks_are_refused_or_read_without_a_crash(extended: Path) -> None:
    seed = int(os.environ.get("FFRECORD_FUZZ_SEED", random.randrange(2**32)))
    source = random.Random(seed)
    good = extended.read_bytes()
    at = 12 + 36
    (length,) = struct.unpack_from("<Q", good, at + 24)
    for case in range(CASES):
        raw = bytearray(good)
        for _ in range(source.randint(1, 3)):
            where = at + 8 + source.randrange(length - 8)
            if source.random() < 0.5:
                raw[where] = source.randrange(256)
            else:
                value = source.choice([0, 1, 63, 64, 4096, 2**32, 2**63, 2**64 - 1])
                struct.pack_into("<Q", raw, where, value)
        extended.write_bytes(raw)
        for check_data in (True, False):
            try:
                reader = FileReader(extended, check_data)
                found = [r.tobytes() for r in reader.read(range(3))]
                assert found == [b"one", b"", b"three" * 2000], f"seed {seed}, case {case}"
                reader.get_metadata(0)
                for key in reader.get_keys(0):
                    reader.read_one(reader.index_of(key))
            except (DamagedFileError, KeyError):
                continue
