"""Files that are either whole or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from hfai.atomic import replacing


def test_a_new_file_is_whole_and_alone(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as file:
        file.write(b"new")
        assert not (tmp_path / "file").exists()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_leaves_the_old_file_and_no_trace(
    tmp_path: Path, error: type[BaseException]
) -> None:
    (tmp_path / "file").write_bytes(b"old")

    def fail() -> None:
        with replacing(tmp_path / "file") as file:
            file.write(b"half of the n")
            raise error

    with pytest.raises(error):
        fail()
    assert (tmp_path / "file").read_bytes() == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_two_writers_at_once_do_not_mix(tmp_path: Path) -> None:
    with replacing(tmp_path / "file") as first, replacing(tmp_path / "file") as second:
        first.write(b"a" * 1000)
        second.write(b"b" * 1000)
    assert (tmp_path / "file").read_bytes() == b"a" * 1000  # the last to be renamed


def test_a_written_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "plain").write_bytes(b"")
    with replacing(tmp_path / "file"):
        pass
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "plain").stat().st_mode
