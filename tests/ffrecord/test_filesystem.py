"""A packed folder through fsspec: by URL, by batches, read only."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import fsspec
import pytest

from ffrecord import pack_folder
from ffrecord.filesystem import PackedFolderFileSystem

FILES = {
    "readme.txt": b"hello",
    "images/1.jpg": b"\xff\xd8one",
    "images/2.jpg": b"\xff\xd8two",
    "images/deep/3.png": b"",
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packed") / "in"
    for name, data in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    (folder / "empty").mkdir()
    pack_folder(folder, folder.parent / "p.ffr")
    return folder.parent / "p.ffr"


@pytest.fixture
def files(path: Path) -> PackedFolderFileSystem:
    return PackedFolderFileSystem(path)


@pytest.mark.parametrize("place", ["{}", "file://{}", "local://{}"])
def test_a_url_opens_a_file_in_the_folder(place: str, path: Path) -> None:
    with fsspec.open(f"ffrecord://images/1.jpg::{place.format(path)}") as file:
        assert file.read() == FILES["images/1.jpg"]
    with fsspec.open(f"ffrecord://readme.txt::{path}", "rt") as text:
        assert text.read() == "hello"


def test_the_protocol_is_known_once_hfai_is_installed(path: Path) -> None:
    from importlib import metadata

    names = [point.name for point in metadata.entry_points(group="fsspec.specs")]
    if "ffrecord" not in names:
        pytest.skip("this interpreter has no installed hfai")
    code = (
        "import fsspec, sys\n"
        "print(fsspec.open(f'ffrecord://readme.txt::{sys.argv[1]}').open().read())"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True)
    assert done.stdout.strip() == "b'hello'", done.stderr


def test_names_sizes_and_kinds_are_listed(files: PackedFolderFileSystem) -> None:
    assert files.ls("", detail=False) == ["empty", "images", "readme.txt"]
    assert files.ls("/images/") == [
        {"name": "images/1.jpg", "size": 5, "type": "file"},
        {"name": "images/2.jpg", "size": 5, "type": "file"},
        {"name": "images/deep", "size": 0, "type": "directory"},
    ]
    assert files.find("") == sorted(FILES)
    assert files.glob("**/*.jpg") == ["images/1.jpg", "images/2.jpg"]
    assert files.isdir("empty")
    assert files.isfile("readme.txt")
    assert not files.exists("nothing")
    assert files.du("images") == 10
    assert [name for name, _, _ in files.walk("")] == ["", "empty", "images", "images/deep"]


def test_many_files_are_one_read(files: PackedFolderFileSystem) -> None:
    calls: list[object] = []
    read = files._packed.reader.read
    files._packed.reader.read = lambda *given: calls.append(given) or read(*given)
    assert files.cat(list(FILES)) == FILES
    assert files.cat("images", recursive=True) == {
        name: data for name, data in FILES.items() if name.startswith("images")
    }
    assert len(calls) == 2
    assert files.cat("readme.txt") == b"hello"
    assert files.cat_file("readme.txt", 1, -1) == b"ell"


def test_what_is_missing_is_told_left_out_or_returned(files: PackedFolderFileSystem) -> None:
    with pytest.raises(FileNotFoundError, match="nothing"):
        files.cat(["readme.txt", "nothing"])
    assert files.cat(["readme.txt", "nothing"], on_error="omit") == {"readme.txt": b"hello"}
    returned = files.cat(["nothing"], on_error="return")
    assert isinstance(returned["nothing"], FileNotFoundError)
    for name in ("nothing", "images/nothing", "readme.txt/below"):
        with pytest.raises(FileNotFoundError):
            files.open(name)
    with pytest.raises(IsADirectoryError):
        files.cat("images")


def test_a_tree_is_copied_out(files: PackedFolderFileSystem, tmp_path: Path) -> None:
    files.get("images", str(tmp_path / "out"), recursive=True)
    assert (tmp_path / "out" / "deep" / "3.png").read_bytes() == b""
    assert (tmp_path / "out" / "2.jpg").read_bytes() == FILES["images/2.jpg"]


def test_nothing_is_written(files: PackedFolderFileSystem) -> None:
    for mode in ("wb", "ab", "r+b"):
        with pytest.raises(ValueError, match="only read"):
            files.open("new.txt", mode)


def test_it_is_pickled_by_its_file(files: PackedFolderFileSystem) -> None:
    assert pickle.loads(pickle.dumps(files)).cat("readme.txt") == b"hello"


def test_no_file_and_a_wrong_file_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="give fo="):
        fsspec.filesystem("ffrecord")
    with pytest.raises(FileNotFoundError, match="no such file"):
        fsspec.open(f"ffrecord://x::{tmp_path}/none.ffr").open()
