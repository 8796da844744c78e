"""Files that the original wrote: whole ones open here, and are what the writer writes."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from ffrecord import FileReader, FileWriter, HeaderError, RecordError, RecordWarning
from tests.ffrecord.conftest import DATA

WHOLE = ["basic.ffr", "empty.ffr", "single.ffr", *(f"multi.ffr/PART_0000{i}.ffr" for i in range(4))]


def entry(manifest: dict[str, Any], name: str) -> dict[str, Any]:
    found: dict[str, Any] = next(file for file in manifest["files"] if file["path"] == name)
    return found


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("tables", ["memory", "demand"])
def test_a_sample_reads_as_its_manifest_says(
    name: str, tables: Any, manifest: dict[str, Any]
) -> None:
    expected = entry(manifest, name)
    with FileReader(DATA / name, tables=tables) as reader:
        assert len(reader) == reader.n == expected["n"]
        batch = reader.read(range(reader.n))
        for record, wanted in zip(batch, expected["records"], strict=True):
            assert hashlib.sha256(record).hexdigest() == wanted["sha256"]
        assert [reader.read_one(i).tobytes() for i in range(reader.n)] == [
            record.tobytes() for record in batch
        ]
        assert reader.get_checksums(0).tolist() == [r["crc32"] for r in expected["records"]]
        lengths = [record["len"] for record in expected["records"]]
        assert (reader.get_offsets(0)[1:] - reader.get_offsets(0)[:-1]).tolist() == lengths
        assert reader.get_offsets(0)[-1] == expected["file_size"]
        reader.validate(deep=True)


@pytest.mark.parametrize("name", WHOLE)
@pytest.mark.parametrize("streaming", [False, True])
def test_the_writer_writes_the_original_s_bytes(
    name: str, streaming: bool, tmp_path: Path, manifest: dict[str, Any]
) -> None:
    records = FileReader(DATA / name).read(slice(None))
    with FileWriter(tmp_path / "copy.ffr", None if streaming else len(records)) as writer:
        writer.write(records)
    copy = (tmp_path / "copy.ffr").read_bytes()
    assert hashlib.sha256(copy).hexdigest() == entry(manifest, name)["file_sha256"]


def test_a_directory_is_its_parts_in_order(manifest: dict[str, Any]) -> None:
    reader = FileReader(DATA / "multi.ffr")
    wanted = [
        record["sha256"]
        for file in manifest["files"]
        if file["path"].startswith("multi.ffr/")
        for record in file["records"]
    ]
    assert [hashlib.sha256(record).hexdigest() for record in reader] == wanted
    order = [99, 0, -1, 25, 24, 50, 0]
    assert [hashlib.sha256(record).hexdigest() for record in reader.read(order)] == [
        wanted[i] for i in order
    ]


@pytest.mark.parametrize("name", ["header_crc_flipped", "record_crc_flipped"])
def test_a_header_whose_checksum_is_wrong_is_refused(name: str) -> None:
    path = DATA / "damaged" / f"{name}.ffr"
    with pytest.raises(HeaderError, match=r"expected checksum 0x\w{8}, found 0x\w{8}") as caught:
        FileReader(path)
    assert caught.value.path == str(path)
    assert len(FileReader(path, check_data=False).read(range(11))) == 11


def test_an_old_file_without_header_checksum_is_read_with_a_warning() -> None:
    with pytest.warns(RecordWarning, match="old version"):
        reader = FileReader(DATA / "damaged" / "legacy_zero_header_crc.ffr")
    reader.read(range(11))


def test_cut_off_data_are_found_when_the_last_record_is_read() -> None:
    reader = FileReader(DATA / "damaged" / "truncated_data.ffr")
    reader.read(range(10))
    for read in (lambda: reader.read([3, 10]), lambda: reader.read_one(10)):
        with pytest.raises(RecordError, match="record 10 is damaged") as caught:
            read()
        error = caught.value
        assert (error.index, error.offset, error.expected) == (10, 14239, 3392465113)
        assert error.path is not None
        assert error.path.endswith("truncated_data.ffr")
        assert all(text in str(error) for text in ("14239", f"{3392465113:#010x}", error.path))
    with pytest.raises(RecordError):
        reader.validate(deep=True)
    assert [error.index for error in reader.damaged()] == [10]
