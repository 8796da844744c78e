"""A file or a directory is under its name when it is whole, or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
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


def test_the_umask_of_other_threads_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(mask: int) -> int:
        raise AssertionError(f"umask({mask:o}) holds for all threads")

    monkeypatch.setattr(os, "umask", refuse)
    with whole_directory(tmp_path / "d"):
        pass
    assert (tmp_path / "d").is_dir()


def test_all_files_are_on_the_disk_before_the_directory_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flush, flushed = os.fsync, set()

    def note(descriptor: int) -> None:
        if not (tmp_path / "d").exists():
            flushed.add(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    with whole_directory(tmp_path / "d") as work:
        (work / "sub").mkdir()
        (work / "sub" / "x").write_text("x")
    assert flushed == {work, work / "sub", work / "sub" / "x"}


def test_a_missing_directory_is_named_by_the_file_that_was_asked_for(tmp_path: Path) -> None:
    for whole in (whole_directory, whole_file):
        with pytest.raises(FileNotFoundError) as caught, whole(tmp_path / "no" / "a"):
            pass
        assert ".tmp" not in str(caught.value)


@pytest.mark.parametrize("whole", [whole_directory, whole_file])
def test_a_forked_child_that_leaves_the_block_disturbs_nobody(
    whole: Callable[[Path], AbstractContextManager[Path]], tmp_path: Path
) -> None:
    def fork(error: type[BaseException] | None) -> None:
        child = os.fork()
        if child == 0:
            try:
                context.__exit__(error, error and error(), None)
            except BaseException as found:
                os._exit(0 if isinstance(found, ValueError) else 1)
            os._exit(0 if error else 2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    context = whole(tmp_path / "a")
    work = context.__enter__()
    (work / "x" if whole is whole_directory else work).write_text("x")
    fork(None)
    fork(LookupError)
    assert [path.name for path in tmp_path.iterdir()] == [work.name]
    context.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
