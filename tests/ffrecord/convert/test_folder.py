"""Folders: packed and unpacked through `convert` as by the functions; keys become paths safely."""

from __future__ import annotations

from pathlib import Path

import pytest

from ffrecord import NameWarning, PackedFolder, pack_folder
from ffrecord.convert import convert
from tests.ffrecord.convert.conftest import Rows, write_rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("b.txt", "a/x.bin", "a/deep/y"):
        path = tmp_path / "in" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode() * 1000)
    (tmp_path / "in" / "empty").mkdir()
    return tmp_path / "in"


def contents(folder: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def test_a_folder_becomes_what_pack_folder_writes(folder: Path) -> None:
    assert convert([folder], folder.parent / "a.ffr").records == 3
    pack_folder(folder, folder.parent / "b.ffr")
    first, second = ((folder.parent / name).read_bytes() for name in ("a.ffr", "b.ffr"))
    assert first == second


def test_a_packed_folder_becomes_the_folder_with_its_empty_directories(folder: Path) -> None:
    convert([folder], folder.parent / "a.ffr")
    convert([folder.parent / "a.ffr"], folder.parent / "out", target_format="folder")
    assert contents(folder.parent / "out") == contents(folder)


def test_a_packed_folder_goes_through_tar(folder: Path) -> None:
    convert([folder], folder.parent / "a.ffr")
    convert([folder.parent / "a.ffr"], folder.parent / "a.tar")
    convert([folder.parent / "a.tar"], folder.parent / "b.ffr")
    convert([folder.parent / "b.ffr"], folder.parent / "out", target_format="folder")
    expected = {name: data for name, data in contents(folder).items() if name != "empty"}
    assert contents(folder.parent / "out") == expected


def test_records_without_keys_are_files_by_number(plain: Path, keyed: Rows) -> None:
    convert([plain], plain.parent / "out", target_format="folder")
    found = contents(plain.parent / "out")
    assert found == {f"{number:010d}.bin": data for number, (_, data) in enumerate(keyed)}


@pytest.mark.parametrize("key", ["../x", "/etc/x", "a/../../x", "a\\b", "", "a\0b", "a//b"])
def test_a_key_that_leads_elsewhere_is_refused(key: str, tmp_path: Path) -> None:
    write_rows(tmp_path / "a.ffr", [("fine", b"1"), (key, b"2")])
    with pytest.raises(ValueError, match="no path in a folder"):
        convert([tmp_path / "a.ffr"], tmp_path / "out", target_format="folder")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]


def test_a_key_below_a_file_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.ffr", [("x", b"1"), ("x/y", b"2")])
    with pytest.raises(OSError, match="x"):
        convert([tmp_path / "a.ffr"], tmp_path / "out", target_format="folder")
    assert [path.name for path in tmp_path.iterdir()] == ["a.ffr"]


def test_keys_that_differ_only_in_case_are_told(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.ffr", [("Read.me", b"1"), ("read.me", b"2")])
    with pytest.warns(NameWarning, match=r"Read\.me and read\.me"):
        convert([tmp_path / "a.ffr"], tmp_path / "out", target_format="folder")


def test_a_repacked_folder_is_the_same_file(folder: Path) -> None:
    convert([folder], folder.parent / "a.ffr")
    convert([folder.parent / "a.ffr"], folder.parent / "b.ffr")
    assert (folder.parent / "a.ffr").read_bytes() == (folder.parent / "b.ffr").read_bytes()
    with PackedFolder(folder.parent / "b.ffr") as packed:
        assert packed.is_dir("empty")
