"""TFRecord: the framing, against another reader and writer; every damaged byte is found."""

from __future__ import annotations

import gzip
import random
import struct
from pathlib import Path

import pytest

from ffrecord.convert import convert
from tests.ffrecord.convert.conftest import Rows, rows_of, write_rows

pytest.importorskip("google_crc32c")


def crc32c(data: bytes) -> int:
    """CRC-32C bit by bit: the polynomial 1EDC6F41 reflected (RFC 3720, section B.4)."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value ^ 0xFFFFFFFF


def masked(content: bytes) -> bytes:
    crc = crc32c(content)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)


def framed(data: bytes) -> bytes:
    """A record's frame from the description alone."""
    length = struct.pack("<Q", len(data))
    return length + masked(length) + data + masked(data)


def test_another_reader_reads_what_is_written(source: Path, keyed: Rows) -> None:
    tfrecord = pytest.importorskip("tfrecord")
    convert([source], source.parent / "a.tfrecord")
    found = tfrecord.tfrecord_iterator(str(source.parent / "a.tfrecord"))
    assert [bytes(record) for record in found] == [data for _, data in keyed]


def test_examples_of_another_writer_are_read_whole(tmp_path: Path) -> None:
    tfrecord = pytest.importorskip("tfrecord")
    writer = tfrecord.TFRecordWriter(str(tmp_path / "a.tfrecord"))
    for number in range(5):
        writer.write({"label": (number, "int"), "image": (bytes([number]) * 100, "byte")})
    writer.close()
    convert([tmp_path / "a.tfrecord"], tmp_path / "a.ffr")
    rows = rows_of(tmp_path / "a.ffr")
    assert len(rows) == 5
    from tfrecord import example_pb2

    for number, (_, data) in enumerate(rows):
        example = example_pb2.Example.FromString(data)
        assert example.features.feature["label"].int64_list.value[0] == number
        assert example.features.feature["image"].bytes_list.value[0] == bytes([number]) * 100


def test_the_bytes_are_those_of_the_description(tmp_path: Path) -> None:
    assert crc32c(b"123456789") == 0xE3069283  # the check value of CRC-32C
    write_rows(tmp_path / "a.ffr", [(None, b"abc"), (None, b"")])
    convert([tmp_path / "a.ffr"], tmp_path / "a.tfrecord")
    assert (tmp_path / "a.tfrecord").read_bytes() == framed(b"abc") + framed(b"")


def test_compressed_files_are_read_and_written(source: Path, keyed: Rows) -> None:
    path = source.parent / "a.tfrecord.gz"
    convert([source], path)
    assert path.read_bytes().startswith(b"\x1f\x8b")
    convert([source], source.parent / "b.tfrecord")
    assert gzip.decompress(path.read_bytes()) == (source.parent / "b.tfrecord").read_bytes()
    convert([path], source.parent / "back.ffr")
    assert [data for _, data in rows_of(source.parent / "back.ffr")] == [d for _, d in keyed]


def test_a_flipped_bit_or_a_missing_end_is_found(source: Path, tmp_path: Path) -> None:
    convert([source], tmp_path / "a.tfrecord")
    good = (tmp_path / "a.tfrecord").read_bytes()
    chooser = random.Random(1)
    for turn in range(60):
        raw = bytearray(good)
        if turn % 2:
            raw[chooser.randrange(len(raw))] ^= 1 << chooser.randrange(8)
        else:
            # At a border of two records nothing is missing.
            del raw[chooser.randrange(1, 4000) :]
        (tmp_path / "a.tfrecord").write_bytes(raw)
        with pytest.raises(ValueError, match=r"damaged|cut short"):
            convert([tmp_path / "a.tfrecord"], tmp_path / "x.ffr")
        assert not (tmp_path / "x.ffr").exists()


def test_a_length_of_nonsense_takes_no_memory(tmp_path: Path) -> None:
    length = struct.pack("<Q", 1 << 60)
    (tmp_path / "a.tfrecord").write_bytes(length + masked(length) + b"x" * 100)
    with pytest.raises(ValueError, match="cut short"):
        convert([tmp_path / "a.tfrecord"], tmp_path / "a.ffr")
