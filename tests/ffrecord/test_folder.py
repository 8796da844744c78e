"""Packed folders: the original's layout, and nothing that a hostile index could do."""

from __future__ import annotations

import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest

from ffrecord import (
    DamagedFileError,
    FileWriter,
    NameWarning,
    PackedFolder,
    RecordError,
    pack_folder,
    unpack,
)
from ffrecord.convert import convert
from tests.ffrecord.independent import read_file

FILES = {"b.txt": b"bee", "a/z": b"zed" * 1000, "a/y": b"", "c/d/é.bin": bytes(range(256))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    root = tmp_path / "in"
    for name, data in FILES.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    (root / "void").mkdir()
    return root


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    pack_folder(folder, tmp_path / "p.ffr")
    return tmp_path / "p.ffr"


def with_index(path: Path, index: Any, records: int = 1) -> Path:
    with FileWriter(path) as writer:
        writer.write([b"data"] * records)
        writer.write_one(index if isinstance(index, bytes) else b"piouhjgbr" + pickle.dumps(index))
    return path


def test_the_layout_is_the_original_s(packed: Path) -> None:
    *contents, index = read_file(packed)
    assert contents == [FILES[name] for name in ("a/y", "a/z", "b.txt", "c/d/é.bin")]
    assert index[:9] == b"piouhjgbr"
    tree = pickle.loads(index[9:])
    assert tree == OrderedDict(
        a=OrderedDict(y=0, z=1),
        **{"b.txt": 2},
        c=OrderedDict(d=OrderedDict({"é.bin": 3})),
        void=OrderedDict(),
    )


def test_files_are_read_by_path(packed: Path) -> None:
    with PackedFolder(packed) as folder:
        for name, data in FILES.items():
            assert folder.read_one(name).tobytes() == data
            assert folder.is_file(Path(name))
        names = list(FILES)
        assert [r.tobytes() for r in folder.read(names)] == list(FILES.values())
        assert [r.tobytes() for r in folder.read("b.txt")] == [b"bee"]
        assert folder.num_files() == 4
        assert folder.is_dir("a")
        assert folder.is_dir("")
        assert not folder.is_dir("b.txt")
        assert folder.exists("void")
        assert not folder.exists("b.txt/x")
        with pytest.raises(FileNotFoundError, match="no nope in"):
            folder.read_one("nope")
        with pytest.raises(IsADirectoryError):
            folder.read(["a"])


def test_listing_gives_strings_whatever_the_depth(packed: Path) -> None:
    folder = PackedFolder(packed)
    assert folder.list() == ["a", "b.txt", "c", "void"]
    assert folder.list(list_dir=False) == ["b.txt"]
    assert folder.list("a", recursive=True) == ["y", "z"]
    assert folder.list(list_file=False, recursive=True) == ["a", "c", "c/d", "void"]
    assert folder.list(list_dir=False, recursive=True) == ["a/y", "a/z", "b.txt", "c/d/é.bin"]
    with pytest.raises(NotADirectoryError):
        folder.list("b.txt")


def test_unpacking_gives_the_folder_back(packed: Path, tmp_path: Path) -> None:
    done: list[int] = []
    unpack(packed, tmp_path / "out", progress=done.append)
    found = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == FILES
    assert (tmp_path / "out" / "void").is_dir()
    assert sum(done) == 4
    with pytest.raises(FileExistsError):
        unpack(packed, tmp_path / "out")


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("evil",)


@pytest.mark.parametrize(
    "index",
    [
        OrderedDict(a=Evil()),
        OrderedDict(a=1),
        OrderedDict(a=-1),
        OrderedDict(a=True),
        OrderedDict(a="text"),
        OrderedDict({1: 0}),
        OrderedDict({"..": OrderedDict(a=0)}),
        OrderedDict({"/etc/x": 0}),
        OrderedDict({"a/../../x": 0}),
        OrderedDict({"": 0}),
        OrderedDict({"a\\b": 0}),
        OrderedDict({"a\0b": 0}),
        {"a": 0},
        [],
        b"piouhjgbr",
        b"piouhjgbr\x80\x04garbage",
        b"no index",
    ],
    ids=range(17),
)
def test_an_index_that_could_do_harm_is_refused(
    index: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path = with_index(tmp_path / "x.ffr", index)
    with pytest.raises(DamagedFileError, match=r"x\.ffr"):
        PackedFolder(path)
    with pytest.raises(DamagedFileError):
        unpack(path, tmp_path / "out")
    assert [found.name for found in tmp_path.iterdir()] == ["x.ffr"]


def test_an_index_that_contains_itself_is_refused(tmp_path: Path) -> None:
    tree: Any = OrderedDict()
    tree["a"] = tree
    with pytest.raises(DamagedFileError):
        PackedFolder(with_index(tmp_path / "x.ffr", tree))


def test_an_empty_file_is_no_packed_folder(tmp_path: Path) -> None:
    FileWriter(tmp_path / "x.ffr").close()
    with pytest.raises(DamagedFileError, match="no packed folder"):
        PackedFolder(tmp_path / "x.ffr")


def test_names_that_differ_in_case_are_reported(tmp_path: Path) -> None:
    path = with_index(tmp_path / "x.ffr", OrderedDict(Readme=0, README=1), 2)
    with pytest.warns(NameWarning, match="Readme and README"):
        unpack(path, tmp_path / "out")
    with pytest.warns(NameWarning, match="README and Readme"):
        pack_folder(tmp_path / "out", tmp_path / "y.ffr")


def test_names_that_differ_in_how_accents_are_written_are_reported(tmp_path: Path) -> None:
    path = with_index(tmp_path / "x.ffr", OrderedDict({"\u00e9": 0, "e\u0301": 1}), 2)
    with pytest.warns(NameWarning, match="accents' form"):
        unpack(path, tmp_path / "out")


def test_links_out_of_the_folder_and_circles_are_reported_together(
    folder: Path, tmp_path: Path
) -> None:
    (folder / "inside").symlink_to(folder / "a")
    pack_folder(folder, tmp_path / "ok.ffr")
    assert PackedFolder(tmp_path / "ok.ffr").read_one("inside/z").tobytes() == FILES["a/z"]
    (folder / "secret").symlink_to("/etc/passwd")
    (folder / "a" / "up").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "nothing")
    os.mkfifo(folder / "pipe")
    with pytest.raises(ValueError, match=r"a/up .*gone: .*pipe .*secret "):
        pack_folder(folder, tmp_path / "p.ffr")
    assert not (tmp_path / "p.ffr").exists()


def test_damage_while_unpacking_leaves_no_directory(packed: Path, tmp_path: Path) -> None:
    raw = packed.read_bytes().replace(b"zedzed", b"zadzed", 1)
    packed.write_bytes(raw)
    with pytest.raises(RecordError, match="record 1"):
        unpack(packed, tmp_path / "out")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["in", "p.ffr"]


@pytest.mark.parametrize("workers", [1, 16])
def test_many_files_come_through_any_number_of_threads(workers: int, tmp_path: Path) -> None:
    contents = {f"{n % 13}/{n}.bin": bytes([n % 256]) * (n * 37 % 5000) for n in range(500)}
    for name, data in contents.items():
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_bytes(data)
    seen: list[int] = []
    pack_folder(tmp_path / "in", tmp_path / "p.ffr", workers=workers, progress=seen.append)
    assert sum(seen) == 500
    unpack(tmp_path / "p.ffr", tmp_path / "out", workers=workers, progress=seen.append)
    assert sum(seen) == 1000
    found = {
        str(path.relative_to(tmp_path / "out")): path.read_bytes()
        for path in (tmp_path / "out").rglob("*")
        if path.is_file()
    }
    assert found == contents


def test_a_file_that_vanishes_while_packing_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    for number in range(100):
        (tmp_path / "in" / f"{number:03d}").write_text("x")

    def remove(count: int) -> None:
        (tmp_path / "in" / "099").unlink(missing_ok=True)

    with pytest.raises(FileNotFoundError, match="099"):
        pack_folder(tmp_path / "in", tmp_path / "p.ffr", progress=remove)
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


def test_what_readers_refuse_is_not_packed(folder: Path, tmp_path: Path) -> None:
    (folder / "a" / "back\\slash").write_bytes(b"precious")
    deep = folder / "/".join(["d"] * 201)
    deep.mkdir(parents=True)
    with pytest.raises(ValueError, match="not packed") as caught:
        pack_folder(folder, tmp_path / "p.ffr")
    assert "a/back\\slash has a separator in it" in str(caught.value)
    assert "d/d is more than 200 directories deep" in str(caught.value)
    with pytest.raises(ValueError, match="has a separator in it"):
        convert([folder], tmp_path / "p.ffr")
    assert not (tmp_path / "p.ffr").exists()
    deep.rmdir()
    (folder / "a" / "back\\slash").unlink()
    pack_folder(folder, tmp_path / "p.ffr")  # the deepest that may be is read back, too
    unpack(tmp_path / "p.ffr", tmp_path / "out")
    assert (tmp_path / "out" / deep.relative_to(folder).parent).is_dir()
