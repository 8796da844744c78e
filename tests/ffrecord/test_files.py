"""Files by threads: order kept, bounded, errors named, no thread left behind."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ffrecord import files
from ffrecord.files import FilesWriter, read_files


@pytest.fixture
def paths(tmp_path: Path) -> list[str]:
    for number in range(200):
        (tmp_path / f"{number}").write_bytes(b"%d" % number * (number % 7 * 1000))
    return [str(tmp_path / f"{number}") for number in range(200)]


@pytest.mark.parametrize("workers", [1, 3, None])
def test_contents_come_in_the_order_of_paths(paths: list[str], workers: int | None) -> None:
    assert list(read_files(paths, workers)) == [Path(path).read_bytes() for path in paths]


def test_what_waits_is_bounded_in_bytes(paths: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that are all larger than the bound are read one by one."""
    monkeypatch.setattr(files, "_AHEAD_BYTES", 1)
    assert list(read_files(paths)) == [Path(path).read_bytes() for path in paths]


def test_leaving_early_and_errors_leave_no_thread(paths: list[str], tmp_path: Path) -> None:
    before = threading.active_count()
    contents = read_files(paths)
    next(contents)
    contents.close()  # type: ignore[attr-defined]
    with pytest.raises(FileNotFoundError, match="missing"):
        list(read_files([*paths[:50], str(tmp_path / "missing"), *paths[50:]]))
    assert threading.active_count() == before


def test_files_are_written_whole_and_never_over_another(tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    with FilesWriter(tmp_path, 3) as writer:
        writer.write([(f"new{number}", bytes([number]) * number) for number in range(100)])
        with pytest.raises(FileExistsError, match="there"):
            writer.write([("there", b"other")])
    assert (tmp_path / "there").read_text() == "mine"
    assert all((tmp_path / f"new{n}").read_bytes() == bytes([n]) * n for n in range(100))
