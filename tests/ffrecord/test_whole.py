"""A file or a directory is under its name when it is whole, or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ffrecord.whole import whole_directory, whole_file


def test_a_file_appears_at_the_end_and_replaces_the_old_one(tmp_path: Path) -> None:
    target = tmp_path / "a.tar"
    target.write_text("old")
    with whole_file(target) as work:
        work.write_text("new")
        assert target.read_text() == "old"
        assert not work.name.endswith(".ffr")
    assert target.read_text() == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_an_exception_leaves_the_old_file(tmp_path: Path) -> None:
    target = tmp_path / "a.tar"
    target.write_text("old")

    def fail() -> None:
        with whole_file(target) as work:
            work.write_text("half")
            raise LookupError("mine")

    with pytest.raises(LookupError, match="mine"):
        fail()
    with pytest.raises(FileNotFoundError), whole_file(target):
        pass  # nothing was written
    assert target.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["a.tar"]


def test_a_directory_has_the_mode_that_the_umask_leaves(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        with whole_directory(tmp_path / "d") as work:
            (work / "x").write_text("x")
            assert not (tmp_path / "d").exists()
    finally:
        os.umask(before)
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o750
