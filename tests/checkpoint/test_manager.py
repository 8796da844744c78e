"""Saves beside a running training, in one process: snapshots, memory, errors, what stays."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hfai import checkpoint
from hfai.checkpoint import CheckpointManager
from hfai.checkpoint.shard import SEGMENT
from hfai.checkpoint.staging import HostPool
from tests.checkpoint.training import Training, bits, same

LARGE = 12 << 20  # floats: 48 MiB, two buffers


def in_child(work: Callable[[], object]) -> int:
    """Run in a forked process with one thread; return its exit status."""
    torch.set_num_threads(1)
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def test_an_asynchronous_save_is_of_the_moment_it_was_asked_for(tmp_path: Path) -> None:
    training = Training()
    training.steps(2)
    big = torch.nn.Parameter(torch.zeros(LARGE))
    training.optimizer.add_param_group({"params": [big]})
    model = torch.nn.ModuleDict({"m": training.model})
    model.register_parameter("big", big)
    expected = {name: bits(t) for name, t in model.state_dict().items()}
    counter = torch.tensor([1.0])
    handle = checkpoint.save_async(
        tmp_path / "a", model, training.optimizer, others={"counter": counter}
    )
    counter.add_(5)
    training.model.norm.running_mean.add_(1)
    big.grad = torch.ones(LARGE)
    training.optimizer.step()  # waits until all is copied
    handle.wait()
    assert handle.done()
    loaded = checkpoint.load(tmp_path / "a")
    assert {name: bits(t) for name, t in loaded["model"].items()} == expected
    assert loaded["counter"].item() == 1.0
    assert float(big[0]) != 0.0


def test_without_an_optimizer_to_wait_the_call_returns_when_all_is_copied(tmp_path: Path) -> None:
    state = {"w": torch.zeros(LARGE)}
    handle = checkpoint.save_async(tmp_path / "a", state, rng=False)
    state["w"].fill_(7)
    handle.wait()
    assert not checkpoint.load(tmp_path / "a")["model"]["w"].any()


def test_buffers_stay_within_the_budget_and_are_used_again(tmp_path: Path) -> None:
    pool = HostPool(2 * SEGMENT)
    state = {"w": torch.randn(3 * LARGE)}  # more than twice the budget
    for name in ("a", "b"):
        checkpoint.save_async(tmp_path / name, state, rng=False, pool=pool).wait()
        assert pool.allocated == 2 * SEGMENT
        assert same(checkpoint.load(tmp_path / name)["model"], state)
    pool.trim()
    assert pool.allocated == 0
    with pytest.raises(ValueError, match="two buffers"):
        HostPool(SEGMENT)


def test_a_busy_manager_waits_or_skips(tmp_path: Path) -> None:
    state = {"w": torch.zeros(2 * LARGE)}
    with CheckpointManager(tmp_path / "skip", busy="skip", keep=None) as manager:
        first = manager.save(1, state)
        skipped = manager.save(2, state)
        assert first is not None
        assert skipped is None or first.done()
        first.wait()
        assert manager.save(3, state) is not None
        manager.wait()
        assert 2 not in manager.steps() or skipped is not None
    with CheckpointManager(tmp_path / "wait", keep=None) as manager:
        for step in (1, 2, 3):
            manager.save(step, state)
    assert manager.steps() == [1, 2, 3]


def test_decisions_retention_and_names(tmp_path: Path) -> None:
    training = Training()
    with CheckpointManager(tmp_path, every=10, keep=2, keep_every=30) as manager:
        assert manager.latest() is None
        assert manager.resume(*training.parts()) is None
        for step in range(1, 71):
            if manager.should_save(step):
                manager.save(step, *training.parts(), epoch=step // 10)
        manager.wait()
        assert manager.steps() == [30, 60, 70]
        assert manager.latest() == str(tmp_path / "step-00000070")
        loaded = manager.resume(*training.parts())
        assert loaded is not None
        assert (loaded.step, loaded.epoch) == (70, 7)
        assert not manager.should_save(70), "what was loaded is not saved again"
        with pytest.raises(
            checkpoint.NoCheckpointError, match=r"no checkpoint of step 5: .*30, 60"
        ):
            manager.resume(*training.parts(), step=5)
        older = manager.resume(*training.parts(), step=60)
        assert older is not None
        assert older.step == 60
    with pytest.raises(ValueError, match="closed"):
        manager.save(80, *training.parts())


@pytest.mark.parametrize(
    "options",
    [{"every": 0}, {"keep": 0}, {"every": 1.5}, {"minutes": 0}, {"busy": "?"}, {"host_budget": 1},
     {"threads": -1}, {"timeout": 0}],
)  # fmt: skip
def test_arguments_that_make_no_sense_are_refused(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        CheckpointManager(tmp_path, **options)


def test_a_full_disk_in_the_background_is_raised_at_the_next_boundary(tmp_path: Path) -> None:
    state = {"w": torch.zeros(LARGE)}

    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        manager = CheckpointManager(tmp_path, every=1, keep=1)
        manager.save(1, state)
        manager.wait()
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        manager.save(2, state)
        with pytest.raises(checkpoint.CheckpointError, match=r"OSError: .*File too large"):
            ask_until_it_raises(manager)
        manager.close()

    assert in_child(work) == 0
    assert sorted(os.listdir(tmp_path)) == ["step-00000001"]
    assert not checkpoint.load(tmp_path / "step-00000001")["model"]["w"].any()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody without permission")
def test_lost_permission_is_an_error_that_names_the_place(open_place: Path) -> None:
    directory = open_place / "runs"
    checkpoint.save(directory / "a", {"w": torch.ones(2)})
    directory.chmod(0o755)

    def work() -> None:
        os.setuid(65534)
        with pytest.raises(PermissionError, match="runs"):
            checkpoint.save(directory / "a", {"w": torch.zeros(2)})

    assert in_child(work) == 0
    assert checkpoint.load(directory / "a")["model"]["w"].tolist() == [1, 1]
    assert os.listdir(directory) == ["a"]


def ask_until_it_raises(manager: CheckpointManager) -> None:
    for _ in range(1000):
        manager.should_save(3)
        time.sleep(0.01)


WRITER = """
import sys, torch
from hfai import checkpoint
print("ready", flush=True)
sys.stdin.readline()
for turn in range(12):
    value = float(sys.argv[2]) + turn
    checkpoint.save(sys.argv[1], {"a": torch.full((30000,), value), "b": torch.full((9,), value)})
"""


def test_two_writers_of_one_name_leave_one_whole_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "a"
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", WRITER, str(path), str(1000 * number)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )
        for number in (1, 2)
    ]  # fmt: skip
    for writer in writers:
        assert writer.stdout
        writer.stdout.readline()
    for writer in writers:
        assert writer.stdin
        writer.stdin.write(b"\n")
        writer.stdin.flush()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        try:
            loaded = checkpoint.load(path)["model"]
        except (checkpoint.CheckpointError, OSError):
            continue  # it was replaced and removed while it was read
        values = {*loaded["a"].tolist(), *loaded["b"].tolist()}
        assert len(values) == 1
        seen |= values
    for writer in writers:
        assert writer.wait() == 0
        for stream in (writer.stdin, writer.stdout):
            assert stream
            stream.close()
    assert checkpoint.load(path)["model"]["b"][0] in (1011.0, 2011.0)
    assert os.listdir(tmp_path) == ["a"]
    assert seen


def test_what_a_dead_writer_left_is_removed_and_what_a_living_one_writes_is_not(
    tmp_path: Path,
) -> None:
    dead, alive = tmp_path / ".step-00000001.x.tmp", tmp_path / ".step-00000002.y.tmp"
    for directory in (dead, alive):
        directory.mkdir()
        (directory / "rank-00000.safetensors").write_bytes(b"half")
    from hfai.checkpoint.storage.local import _LocalWriter

    writer = _LocalWriter(tmp_path / "step-00000002", "y")
    with CheckpointManager(tmp_path, asynchronous=False) as manager:
        manager.save(3, {"w": torch.ones(1)})
    assert not dead.exists()
    assert alive.exists()
    writer.abort()
    assert os.listdir(tmp_path) == ["step-00000003"]


def test_a_directory_that_is_no_checkpoint_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="is no checkpoint"):
        checkpoint.save(tmp_path / "a", {"w": torch.ones(1)})
    assert (tmp_path / "a" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["a"]


def test_a_step_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="step is '3'"):
        checkpoint.save(tmp_path / "a", {"w": torch.ones(1)}, step="3")  # type: ignore[arg-type]
    with CheckpointManager(tmp_path) as manager, pytest.raises(ValueError, match="step is -1"):
        manager.save(-1, {"w": torch.ones(1)})


def test_no_thread_is_left_after_close(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with CheckpointManager(tmp_path) as manager:
        manager.save(1, {"w": torch.zeros(LARGE)})
    assert set(threading.enumerate()) <= before
    assert manager._pool.allocated == 0


def test_the_last_save_of_a_path_is_what_stays(tmp_path: Path) -> None:
    large = {"w": torch.zeros(LARGE)}
    link = tmp_path / "link"
    link.symlink_to(tmp_path)
    first = checkpoint.save_async(tmp_path / "a", large, step=1, rng=False)
    second = checkpoint.save_async(tmp_path / "a", {"w": torch.ones(2)}, step=2, rng=False)
    assert first.done(), "one after the other: buffers are counted once"
    second.wait()
    assert checkpoint.load(tmp_path / "a")["step"] == 2
    with CheckpointManager(tmp_path) as manager:
        manager.save(7, large)
        checkpoint.save(link / "step-00000007", {"w": torch.ones(2)}, step=8)
    assert checkpoint.load(tmp_path / "step-00000007")["step"] == 8


def test_a_forked_child_does_not_wait_for_its_parents_save(tmp_path: Path) -> None:
    handle = checkpoint.save_async(tmp_path / "a", {"w": torch.zeros(LARGE)}, rng=False)
    assert in_child(lambda: checkpoint.save(tmp_path / "b", {"w": torch.ones(2)}, rng=False)) == 0
    handle.wait()
    assert sorted(os.listdir(tmp_path)) == ["a", "b"]


def test_what_changes_beside_the_optimizers_step_is_of_the_moment(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3000, 3000), torch.nn.BatchNorm1d(3000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1.0))
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    with torch.no_grad():
        handle = checkpoint.save_async(tmp_path / "a", model.state_dict(), optimizer)
        model[1](torch.ones(2, 3000))
        optimizer.param_groups[0]["lr"].mul_(0.5)
        optimizer.param_groups[0]["betas"] = (0, 0)
    handle.wait()
    loaded = checkpoint.load(tmp_path / "a")
    assert {name: bits(tensor) for name, tensor in loaded["model"].items()} == expected
    group = loaded["optimizer"]["param_groups"][0]
    assert (float(group["lr"]), group["betas"]) == (1.0, (0.9, 0.999))


def test_tied_buffers_stay_tied_and_no_hooks_pile_up(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({"a": torch.nn.Linear(2, 2), "b": torch.nn.Linear(2, 2)})
    shared = torch.ones(3)
    for module in model.values():
        module.register_buffer("x", shared)
    model["a"].register_buffer("of_weight", model["a"].weight.detach())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(4):
        handle = checkpoint.save_async(tmp_path / "a", model, optimizer)
        while not handle.done():
            time.sleep(0.001)
        optimizer.step()
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    handle.wait()
    assert not optimizer._optimizer_step_pre_hooks
    loaded = checkpoint.load(tmp_path / "a")["model"]
    assert loaded["a.x"] is loaded["b.x"]
    assert loaded["a.weight"] is loaded["a.of_weight"]


def save_in_block(path: Path, error: type[Exception] | None = None) -> None:
    with CheckpointManager(path) as manager:
        manager.save(1, {"w": torch.zeros(LARGE)})
        if error is not None:
            raise error


def test_a_failed_save_does_not_hide_the_users_exception(tmp_path: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
        expected = r"last checkpoint was not written: .*File too large"
        with pytest.warns(UserWarning, match=expected), pytest.raises(ZeroDivisionError):
            save_in_block(tmp_path / "a", ZeroDivisionError)
        with pytest.raises(checkpoint.CheckpointError, match="File too large") as caught:
            save_in_block(tmp_path / "a")
        assert isinstance(caught.value.__cause__, OSError)

    assert in_child(work) == 0


@pytest.mark.parametrize("options", [{"threads": -1}, {"timeout": 0}])
def test_a_save_with_arguments_that_make_no_sense_is_refused(options: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        checkpoint.save(tmp_path / "a", {"w": torch.ones(1)}, **options)
