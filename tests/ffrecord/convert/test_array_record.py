"""ArrayRecord: files of the library are read, and the library reads ours."""

from __future__ import annotations

from pathlib import Path

import pytest

from ffrecord.convert import convert
from tests.ffrecord.convert.conftest import Rows, rows_of

module = pytest.importorskip("array_record.python.array_record_module")


@pytest.mark.parametrize("options", ["group_size:1", "group_size:100", "group_size:7,uncompressed"])
def test_a_file_of_the_library_is_read(options: str, tmp_path: Path) -> None:
    writer = module.ArrayRecordWriter(str(tmp_path / "a.array_record"), options)
    for number in range(600):
        writer.write(b"%d" % number * 20)
    writer.close()
    convert([tmp_path / "a.array_record"], tmp_path / "a.ffr")
    assert rows_of(tmp_path / "a.ffr") == [(None, b"%d" % number * 20) for number in range(600)]


def test_the_library_reads_what_is_written(source: Path, keyed: Rows) -> None:
    convert([source], source.parent / "a.array_record")
    reader = module.ArrayRecordReader(str(source.parent / "a.array_record"))
    assert reader.read_all() == [data for _, data in keyed]


def test_a_damaged_file_is_refused(source: Path) -> None:
    path = source.parent / "a.array_record"
    convert([source], path)
    raw = bytearray(path.read_bytes())
    raw[70_000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(ValueError, match="damaged"):
        convert([path], source.parent / "x.ffr")
    assert not (source.parent / "x.ffr").exists()
