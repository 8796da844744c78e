"""`dump`: a whole data set or nothing."""

from __future__ import annotations

import os
import pickle
import signal
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest

from ffrecord import FileReader
from ffrecord.utils import dump


class Squares:
    """Ten squares; one of them may fail."""

    def __init__(self, n: int = 10, raises: int = -1, dies: int = -1) -> None:
        self.n, self.raises, self.dies = n, raises, dies

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, index: int) -> int:
        if index == self.raises:
            raise ZeroDivisionError(f"item {index}")
        if index == self.dies:
            os.kill(os.getpid(), signal.SIGKILL)
        return index**2


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_items_are_spread_over_parts_in_order(method: str, tmp_path: Path) -> None:
    done: list[int] = []
    dump(Squares(), tmp_path / "set.ffr", 4, start_method=method, workers=2, progress=done.append)
    assert sorted(done) == [1, 3, 3, 3]
    names = sorted(path.name for path in (tmp_path / "set.ffr").iterdir())
    assert names == [f"PART_{k:05d}.ffr" for k in range(4)]
    reader = FileReader(tmp_path / "set.ffr")
    assert [pickle.loads(record) for record in reader] == [k**2 for k in range(10)]
    assert [len(reader.get_checksums(k)) for k in range(4)] == [3, 3, 3, 1]


def test_one_file_is_a_file(tmp_path: Path) -> None:
    dump(Squares(), tmp_path / "one.ffr", 1, serialize=lambda value: b"%d" % value)
    assert [int(bytes(record)) for record in FileReader(tmp_path / "one.ffr")] == [
        k**2 for k in range(10)
    ]


def test_fewer_items_than_files_are_said(tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="3 items make 3 files of 1, not 7"):
        dump(Squares(3), tmp_path / "set.ffr", 7, workers=1)
    assert FileReader(tmp_path / "set.ffr").n == 3


def test_an_item_that_fails_fails_the_dump(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError, match="item 7"):
        dump(Squares(raises=7), tmp_path / "set.ffr", 4, workers=2)
    with pytest.raises(ZeroDivisionError, match="item 7"):
        dump(Squares(raises=7), tmp_path / "set.ffr", 1)
    assert list(tmp_path.iterdir()) == []


def test_a_worker_that_dies_fails_the_dump(tmp_path: Path) -> None:
    with pytest.raises(BrokenProcessPool):
        dump(Squares(dies=7), tmp_path / "set.ffr", 4, workers=2)
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "set.ffr").mkdir()
    with pytest.raises(FileExistsError, match="remove it"):
        dump(Squares(), tmp_path / "set.ffr", 2)
    with pytest.raises(ValueError, match="nfiles is 0"):
        dump(Squares(), tmp_path / "new.ffr", 0)


class Slow(Squares):
    """Items that take a while; the first fails at once."""

    def __getitem__(self, index: int) -> int:
        if index:
            time.sleep(0.1)
        return super().__getitem__(index)


def test_a_worker_that_fails_stops_the_others(tmp_path: Path) -> None:
    begin = time.monotonic()
    with pytest.raises(ZeroDivisionError, match="item 0"):
        dump(Slow(400, raises=0), tmp_path / "set.ffr", 2, workers=2)  # 20 s to the end
    assert time.monotonic() - begin < 10
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("nfiles", [1, 2])
def test_directories_are_made_and_names_printed_for_one_file_and_for_many(
    nfiles: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "new" / "set.ffr"
    dump(Squares(), target, nfiles, verbose=True, workers=1)
    names = [target] if nfiles == 1 else [target / f"PART_{k:05d}.ffr" for k in range(nfiles)]
    assert sorted(capsys.readouterr().out.split()) == [str(name) for name in names]
