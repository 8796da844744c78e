"""Tar files: those that WebDataset writes are read, and what is written WebDataset reads."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from ffrecord import FileWriter
from ffrecord.convert import Options, convert
from ffrecord.convert.webdataset import split_name
from tests.ffrecord.convert.conftest import Rows, rows_of


def test_webdataset_reads_what_is_written_as_its_samples(source: Path, keyed: Rows) -> None:
    webdataset = pytest.importorskip("webdataset")
    target = source.parent / "a.tar"
    convert([source], target)
    samples = list(webdataset.WebDataset(str(target), shardshuffle=False))
    assert [sample["__key__"] for sample in samples] == ["set/0000", "set/0001", "set/0002"]
    found = [(s["__key__"] + "." + f, s[f]) for s in samples for f in ("cls", "jpg")]
    assert found == keyed


@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_what_webdataset_writes_is_read(suffix: str, tmp_path: Path) -> None:
    webdataset = pytest.importorskip("webdataset")
    path = tmp_path / f"a.{suffix}"
    with webdataset.TarWriter(str(path)) as writer:
        for number in range(4):
            sample = {"__key__": f"k{number}", "txt": f"text {number}", "bin": bytes([number])}
            writer.write(sample)
    convert([path], tmp_path / "a.ffr")
    rows = dict(rows_of(tmp_path / "a.ffr"))
    assert rows == {
        f"k{number}.{field}": data
        for number in range(4)
        for field, data in (("txt", b"text %d" % number), ("bin", bytes([number])))
    }


def test_a_field_makes_one_record_of_a_sample(source: Path, keyed: Rows) -> None:
    convert([source], source.parent / "a.tar")
    options = Options(field="jpg")
    convert([source.parent / "a.tar"], source.parent / "jpg.ffr", options=options)
    expected = [(str(key)[:-4], data) for key, data in keyed if str(key).endswith(".jpg")]
    assert rows_of(source.parent / "jpg.ffr") == expected
    with pytest.raises(ValueError, match=r"no sample in .* has a file with the extension 'png'"):
        convert([source.parent / "a.tar"], source.parent / "x.ffr", options=Options(field="png"))


def test_equal_records_give_equal_bytes(source: Path) -> None:
    for suffix in ("tar", "tar.gz"):
        for name in "ab":
            convert([source], source.parent / f"{name}.{suffix}")
        first, second = ((source.parent / f"{name}.{suffix}").read_bytes() for name in "ab")
        assert first == second


@pytest.mark.parametrize("end", [512, 700, 1024, 5000, -512])
@pytest.mark.parametrize("suffix", ["tar", "tar.gz"])
def test_a_file_that_is_cut_short_is_refused(source: Path, end: int, suffix: str) -> None:
    path = source.parent / f"a.{suffix}"
    convert([source], path)
    whole = path.read_bytes()
    if suffix == "tar" and end == -512:
        whole = whole.rstrip(b"\0")  # the end of the archive, and of the last member's block
    path.write_bytes(whole[:end])
    with pytest.raises(ValueError, match="cut short"):
        convert([path], source.parent / "b.ffr")
    assert not (source.parent / "b.ffr").exists()


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_what_is_no_file_is_refused_by_its_name(kind: bytes, tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        file = tarfile.TarInfo("file.txt")
        file.size = 1
        archive.addfile(file, io.BytesIO(b"x"))
        other = tarfile.TarInfo("other")
        other.type, other.linkname = kind, "file.txt"
        archive.addfile(other)
    with pytest.raises(ValueError, match="other is neither a file nor a directory"):
        convert([tmp_path / "a.tar"], tmp_path / "a.ffr")


def test_directories_are_passed_over_and_a_name_twice_is_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        directory = tarfile.TarInfo("d")
        directory.type = tarfile.DIRTYPE
        archive.addfile(directory)
        for _ in range(2):
            file = tarfile.TarInfo("d/x.txt")
            file.size = 1
            archive.addfile(file, io.BytesIO(b"x"))
    with pytest.raises(ValueError, match="taken by record 0"):
        convert([tmp_path / "a.tar"], tmp_path / "a.ffr")
    convert([tmp_path / "a.tar"], tmp_path / "a.ffr", options=Options(keys=False))
    assert rows_of(tmp_path / "a.ffr") == [(None, b"x")] * 2


def test_names_are_split_at_the_first_dot_of_their_last_part() -> None:
    assert split_name("a.b/c.seg.png") == ("a.b/c", "seg.png")
    assert split_name("plain") == ("plain", "")


def test_two_records_of_one_name_are_refused(tmp_path: Path) -> None:
    with FileWriter(tmp_path / "a.ffr") as writer:
        writer.write_one(b"1", "0000000001.bin")
        writer.write_one(b"2")
    with pytest.raises(ValueError, match=r"two records would be '0000000001\.bin'"):
        convert([tmp_path / "a.ffr"], tmp_path / "a.tar")
    assert not (tmp_path / "a.tar").exists()
