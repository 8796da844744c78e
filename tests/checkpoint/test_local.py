"""Names in a file system: what is replaced, removed and left there, and never through a link."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfai import checkpoint
from hfai.checkpoint import CheckpointManager
from hfai.checkpoint.storage import local
from tests.checkpoint.test_manager import in_child

ONE = {"w": torch.ones(3)}


def step_of(path: Path) -> int:
    return int(checkpoint.load(path)["step"])


def killed_in(name: str, work: Callable[[], object]) -> None:
    """Do something in a process that is killed where it calls this function of the module."""

    def die(*arguments: object, **options: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def until_killed() -> None:
        module: object = local.shutil if name == "rmtree" else local
        setattr(module, name, die)
        work()

    assert in_child(until_killed) == -signal.SIGKILL


def test_retention_removes_a_link_and_not_what_it_points_to(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "archive", ONE, step=1)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "step-00000001").symlink_to("../archive")
    with CheckpointManager(tmp_path / "run", keep=1, asynchronous=False) as manager:
        manager.save(2, ONE)
    assert os.listdir(tmp_path / "run") == ["step-00000002"]
    assert step_of(tmp_path / "archive") == 1


@pytest.mark.parametrize("points_to", ["real", "nowhere"])
def test_a_link_is_refused_as_a_target_before_anything_is_written(
    points_to: str, tmp_path: Path
) -> None:
    checkpoint.save(tmp_path / "real", ONE, step=1)
    (tmp_path / "link").symlink_to(points_to)
    with pytest.raises(FileExistsError, match="is a symbolic link, which is not written through"):
        checkpoint.save(tmp_path / "link", ONE, step=2)
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]
    assert step_of(tmp_path / "real") == 1


def test_what_a_kill_leaves_of_a_removed_checkpoint_goes_with_the_next_save(tmp_path: Path) -> None:
    with CheckpointManager(tmp_path, keep=2, asynchronous=False) as manager:
        for step in (1, 2):
            manager.save(step, ONE)
        killed_in("rmtree", lambda: manager.save(3, ONE))
        assert manager.steps() == [2, 3]
        assert len(os.listdir(tmp_path)) == 3
        manager.save(4, ONE)
    assert sorted(os.listdir(tmp_path)) == ["step-00000003", "step-00000004"]


def test_what_killed_saves_of_a_name_left_goes_with_its_next_save(tmp_path: Path) -> None:
    for name in ("a", "a.b"):
        killed_in("put_in_place", lambda name=name: checkpoint.save(tmp_path / name, ONE))
    assert len(os.listdir(tmp_path)) == 2
    checkpoint.save(tmp_path / "a", ONE)
    left = sorted(os.listdir(tmp_path))
    assert left[1:] == ["a"]
    assert left[0].startswith(".a.b."), "another name's is left alone"


def test_a_reader_of_a_name_that_is_replaced_gets_the_old_or_the_new_one(tmp_path: Path) -> None:
    path, steps, stop = tmp_path / "a", list[int](), threading.Event()
    checkpoint.save(path, ONE, step=0)
    errors: list[Exception] = []

    def read() -> None:
        while not stop.is_set():
            try:
                steps.append(step_of(path))
            except Exception as error:
                errors.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for step in range(60):
        checkpoint.save(path, ONE, step=step, rng=False)
    stop.set()
    reader.join()
    assert errors == []
    assert steps == sorted(steps)


def test_what_retention_removes_while_it_is_read_is_no_damage(tmp_path: Path) -> None:
    """`resume` takes what is there by then; who asked for that one is told that it is gone."""
    stop = threading.Event()
    errors: list[BaseException] = []
    resumed, gone = list[int](), 0
    values = {"w": torch.zeros(300_000), "v": torch.zeros(3000)}

    def read() -> None:
        nonlocal gone
        reader = checkpoint.CheckpointManager(tmp_path)
        while not stop.is_set():
            try:
                loaded = reader.resume(values, rng=False)
                assert loaded is not None
                assert loaded.step is not None
                assert (values["w"] == loaded.step).all()
                assert (values["v"] == loaded.step).all()
                resumed.append(loaded.step)
                checkpoint.load(reader.latest() or "")
            except checkpoint.NoCheckpointError:
                gone += 1
            except BaseException as error:
                errors.append(error)

    with checkpoint.CheckpointManager(tmp_path, keep=1) as manager:
        manager.save(1, {"w": torch.ones(300_000), "v": torch.ones(3000)}, rng=False)
        manager.wait()
        thread = threading.Thread(target=read)
        thread.start()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for step in range(2, 100):
                value = float(step)
                state = {"w": torch.full((300_000,), value), "v": torch.full((3000,), value)}
                manager.save(step, state, rng=False)
            manager.wait()
            stop.set()
            thread.join()
    assert errors == []
    assert resumed
    assert resumed == sorted(resumed)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
def test_where_the_new_name_cannot_be_made_last_the_old_checkpoint_has_it_again() -> None:
    # Not below pytest's directory, which every pytest that starts takes away from others.
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        directory = Path(place, "runs")
        checkpoint.save(directory / "a", ONE, step=1)
        for path in (directory, directory / "a"):
            os.chown(path, 65534, 65534)
        directory.chmod(0o300)  # names can be made in it, and it cannot be opened to be flushed

        def work() -> None:
            os.setuid(65534)
            for name in ("a", "b"):
                with pytest.raises(PermissionError, match="runs'"):
                    checkpoint.save(directory / name, ONE, step=2)

        assert in_child(work) == 0
        directory.chmod(0o755)
        assert os.listdir(directory) == ["a"]
        assert step_of(directory / "a") == 1


def test_a_name_that_is_too_long_for_the_temporary_one_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="the name has 240 bytes: give one of at most 233"):
        checkpoint.save(tmp_path / ("n" * 240), ONE)
    checkpoint.save(tmp_path / ("n" * 233), ONE)
    assert os.listdir(tmp_path) == ["n" * 233]


def test_a_newest_checkpoint_without_its_commit_record_is_named_and_can_be_saved_again(
    tmp_path: Path,
) -> None:
    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        for step in (1, 2):
            manager.save(step, ONE)
        (tmp_path / "step-00000002" / "COMMIT").unlink()
        state = {"w": torch.zeros(3)}
        with pytest.warns(UserWarning, match="step-00000002 is not used: its COMMIT file is"):
            loaded = manager.resume(state)
        assert loaded is not None
        assert loaded.step == 1
        manager.save(2, ONE)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            loaded = manager.resume(state)
        assert loaded is not None
        assert loaded.step == 2


def test_the_working_directory_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for content in (False, True):
        place = tmp_path / str(content)
        place.mkdir()
        if content:
            checkpoint.save(place, {"w": torch.zeros(1)}, rng=False)
        monkeypatch.chdir(place)
        for path in (".", place):
            with pytest.raises(OSError, match="working directory"):
                checkpoint.save(path, {"w": torch.ones(1)}, rng=False)
        assert bool(os.listdir(".")) == content
        checkpoint.save("below", {"w": torch.ones(1)}, rng=False)
        assert checkpoint.load("below")["model"]["w"] == 1
    monkeypatch.chdir(place / "below")
    with pytest.raises(OSError, match="working directory"):
        checkpoint.save("..", {"w": torch.ones(1)}, rng=False)
