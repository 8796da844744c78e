"""A training that was suspended goes on to the same bits: real ranks, signals and files."""

from __future__ import annotations

import copy
import io
import os
import pickle
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed as dist
from torch import nn

import ffrecord
from ffrecord.torch import DataLoader, Dataset, GlobalBatchSampler
from hfai import checkpoint, client
from hfai.nn.parallel import DistributedDataParallel
from tests.hfreduce.ranks import Ranks

EPOCHS, RECORDS, BATCH, WIDTH = 2, 40, 4, 8
STEPS = EPOCHS * RECORDS // BATCH


class Rows(Dataset):
    """Rows of numbers, with noise that is drawn where they are read."""

    noise = 0.1

    def process(self, indices: list[int], data: list[Any]) -> list[torch.Tensor]:
        rows = [torch.from_numpy(np.frombuffer(record, np.float32).copy()) for record in data]
        return [row + self.noise * torch.randn(WIDTH) for row in rows]


def write_rows(path: Path) -> Path:
    rng = np.random.default_rng(0)
    with ffrecord.FileWriter(path, RECORDS) as writer:
        for _ in range(RECORDS):
            writer.write_one(rng.standard_normal(WIDTH, dtype=np.float32).tobytes())
    return path


class Training:
    """Dropout, AdamW, a schedule, a scaler and a loader, with or without ranks."""

    def __init__(
        self, rows: Path, directory: Path, ranks: int = 1, rank: int = 0, workers: int = 0
    ) -> None:
        torch.manual_seed(5 + rank)
        np.random.seed(rank)
        inner = nn.Sequential(nn.Linear(WIDTH, 16), nn.Dropout(0.3), nn.Tanh(), nn.Linear(16, 1))
        self.model: nn.Module = inner if ranks == 1 else DistributedDataParallel(inner)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=5)
        dataset = Rows(rows)
        if workers:
            dataset.noise = 0.0  # drawn in a worker it is not that of an unbroken run
        sampler = GlobalBatchSampler(dataset, BATCH, rank=rank, world_size=ranks)
        self.loader = DataLoader(dataset, batch_sampler=sampler, num_workers=workers)
        self.epoch, self.step, self.others = checkpoint.init(
            self.model,
            self.optimizer,
            scheduler=self.scheduler,
            amp_scaler=self.scaler,
            ckpt_path=directory,
            loader=self.loader,
            timeout=60,
        )

    def losses(self) -> Iterator[float]:
        """Train from where it stands; the loss is given before the question at the boundary."""
        for epoch in range(self.epoch, EPOCHS):
            for step, batch in enumerate(self.loader, start=self.step):
                loss = self.model(batch).square().mean()
                self.optimizer.zero_grad()
                self.scaler.scale(loss).backward()
                self.scaler.step(self.optimizer)
                self.scaler.update()
                self.scheduler.step()
                yield loss.item()
                others = {"noise": float(np.random.random()), "at": (epoch, step + 1)}
                self.model.try_save(epoch, step + 1, others=others)  # type: ignore[operator]
            self.step = 0


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_rows(tmp_path_factory.mktemp("rows") / "rows.ffr")


@pytest.fixture(autouse=True)
def _forget_requests() -> Iterator[None]:
    client.stop_listening()
    yield
    client.stop_listening()


def until_suspended(training: Training, stop_after: int) -> tuple[list[float], int | None]:
    """Train, and ask to suspend after some steps: the losses, and the exit code if it ends."""
    found: list[float] = []
    try:
        for loss in training.losses():
            found.append(loss)
            if len(found) == stop_after:
                signal.raise_signal(signal.SIGUSR1)
    except SystemExit as leaving:
        return found, int(str(leaving.code))
    return found, None


@pytest.mark.parametrize("stops", [(7,), (1, 9, 4)], ids=["once", "three times"])
def test_a_suspended_training_has_the_losses_of_an_unbroken_one(
    stops: tuple[int, ...], rows: Path, tmp_path: Path
) -> None:
    unbroken = list(Training(rows, tmp_path / "unbroken").losses())
    assert len(unbroken) == STEPS
    resumed: list[float] = []
    for stop in stops:
        part, code = until_suspended(Training(rows, tmp_path / "resumed"), stop)
        assert (len(part), code) == (stop, 75)
        resumed += part
        client.stop_listening()
    training = Training(rows, tmp_path / "resumed")
    assert training.others is not None
    assert training.others["at"] == (training.epoch, training.step)
    assert training.epoch * RECORDS // BATCH + training.step == len(resumed)
    resumed += list(training.losses())
    assert resumed == unbroken


def test_batches_that_workers_read_ahead_are_read_again(rows: Path, tmp_path: Path) -> None:
    unbroken = list(Training(rows, tmp_path / "unbroken", workers=1).losses())
    part, code = until_suspended(Training(rows, tmp_path / "resumed", workers=1), 13)
    assert (len(part), code) == (13, 75)
    client.stop_listening()
    assert part + list(Training(rows, tmp_path / "resumed", workers=1).losses()) == unbroken


def train_as_rank(rank: int, world: int, store: str, rows: Path, out: Path, part: str) -> None:
    """Train with others, each loss a line of a file; a SystemExit ends it."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    training = Training(rows, out / "checkpoints" / part.split("-")[0], world, rank)
    with open(out / f"{part}-{rank}", "w") as file:
        for loss in training.losses():
            file.write(f"{loss.hex()}\n")
            file.flush()
            # The signal must come before the last step, on a machine with other work too.
            time.sleep(0.05 if part == "resumed-1" else 0.01)
    dist.barrier()


def losses_of(out: Path, part: str, world: int) -> list[list[str]]:
    return [(out / f"{part}-{rank}").read_text().split() for rank in range(world)]


def test_ranks_suspend_together_and_go_on_to_the_same_bits(rows: Path, tmp_path: Path) -> None:
    def start(part: str) -> Ranks:
        return Ranks(train_as_rank, 2, rows, tmp_path, part)

    whole = start("unbroken").join()
    assert [end.error for end in whole] == ["", ""], [end.text for end in whole]

    ranks = start("resumed-1")
    first = tmp_path / "resumed-1-1"
    deadline = time.monotonic() + 60
    while not (first.exists() and len(first.read_text().split()) >= 6):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    os.kill(ranks.pid(1), signal.SIGTERM)  # one rank of the two, in the middle of an epoch
    ended = ranks.join()
    assert [end.error for end in ended] == ["SystemExit"] * 2, [end.text for end in ended]

    rest = start("resumed-2").join()
    assert [end.error for end in rest] == ["", ""], [end.text for end in rest]
    unbroken = losses_of(tmp_path, "unbroken", 2)
    before, after = losses_of(tmp_path, "resumed-1", 2), losses_of(tmp_path, "resumed-2", 2)
    assert len(before[0]) == len(before[1]) < STEPS
    assert [one + other for one, other in zip(before, after, strict=True)] == unbroken
    assert unbroken[0] != unbroken[1]  # each rank had batches and dropout of its own


def test_nobody_asks_and_nothing_is_written(rows: Path, tmp_path: Path) -> None:
    training = Training(rows, tmp_path / "none")
    assert (training.epoch, training.step, training.others) == (0, 0, None)
    assert training.model.try_save(0, 1) is False  # type: ignore[operator]
    assert not (tmp_path / "none").exists()


def test_forced_saves_are_kept_in_number_and_the_newest_is_resumed(
    rows: Path, tmp_path: Path
) -> None:
    training = Training(rows, tmp_path)
    for step in (1, 2, 3):
        assert training.model.try_save(0, step, {"n": step}, force=True)  # type: ignore[operator]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    again = Training(rows, tmp_path)
    assert (again.epoch, again.step, again.others) == (0, 3, {"n": 3})
    again.model.try_save(1, 0, force=True)  # type: ignore[operator]
    last = Training(rows, tmp_path)
    assert (last.epoch, last.step, last.others) == (1, 0, None)


def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before(
    rows: Path, tmp_path: Path
) -> None:
    training = Training(rows, tmp_path)
    for step in (1, 2):
        training.model.try_save(0, step, force=True)  # type: ignore[operator]
    largest = max((tmp_path / "step-00000002").iterdir(), key=lambda path: path.stat().st_size)
    data = bytearray(largest.read_bytes())
    data[-1] ^= 1
    largest.write_bytes(data)
    with pytest.warns(UserWarning, match="damaged"):
        assert Training(rows, tmp_path).step == 1
    with pytest.warns(UserWarning, match="damaged"):
        again = Training(rows, tmp_path)
    again.model.try_save(0, 7, force=True)  # type: ignore[operator]
    assert Training(rows, tmp_path).step == 7


def test_a_save_that_fails_is_an_error_and_ends_nothing(rows: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    model = nn.Linear(1, 1)
    checkpoint.init(model, ckpt_path=tmp_path / "file" / "below")
    signal.raise_signal(signal.SIGTERM)
    with pytest.raises((OSError, checkpoint.CheckpointError), match="file"):
        model.try_save(0, 1)  # type: ignore[operator]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no path": ({}, TypeError, "ckpt_path is missing"),
    "no module": ({"model": {}, "ckpt_path": "x"}, TypeError, "model is a dict"),
    "a loader without a place": (
        {"loader": [1, 2], "ckpt_path": "x"},
        TypeError,
        "loader is a list and has no state_dict",
    ),
    "a file": ({"ckpt_path": __file__}, ValueError, "is a file: give a directory"),
}


@pytest.mark.parametrize(("given", "error", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_arguments_are_refused_in_words(
    given: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        checkpoint.init(**{"model": nn.Linear(1, 1), **given})


def test_others_that_are_no_dict_are_refused_and_the_next_save_is_whole(tmp_path: Path) -> None:
    model: Any = nn.Linear(1, 1)
    checkpoint.init(model, ckpt_path=tmp_path)
    with pytest.raises(TypeError, match="others is a list: give a dict"):
        model.try_save(0, 1, others=[1], force=True)
    assert model.try_save(0, 2, others={"x": 1}, force=True)
    assert checkpoint.init(model, ckpt_path=tmp_path) == (0, 2, {"x": 1})


def test_a_checkpoint_that_is_no_trainings_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    checkpoint.save(tmp_path / "one", model)
    with pytest.raises(ValueError, match="is a checkpoint itself"):
        checkpoint.init(model, ckpt_path=tmp_path / "one")
    checkpoint.save(tmp_path / "many" / "step-00000001", model, step=1)
    with pytest.raises(ValueError, match="was not saved by try_save"):
        checkpoint.init(model, ckpt_path=tmp_path / "many")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"epoch": -1, "step": 0}, "epoch is -1"),
        ({"epoch": 0, "step": 1.5}, "step is 1.5"),
        ({"epoch": 0, "step": 0, "others": {"try_save": 1}}, "'try_save', which is taken"),
    ],
)
def test_a_place_that_is_none_is_refused(
    arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    model = nn.Linear(1, 1)
    checkpoint.init(model, ckpt_path=tmp_path)
    with pytest.raises(ValueError, match=said):
        model.try_save(**arguments, force=True)  # type: ignore[operator]


def test_a_model_can_be_copied_and_pickled_all_the_same(tmp_path: Path) -> None:
    model = nn.Linear(1, 1)
    checkpoint.init(model, ckpt_path=tmp_path)
    assert "try_save" not in model.state_dict()
    average = copy.deepcopy(model)
    assert average.weight is not model.weight
    assert average.try_save is model.try_save
    buffer = io.BytesIO(pickle.dumps(model))
    with pytest.raises(RuntimeError, match=r"call hfai\.checkpoint\.init"):
        pickle.load(buffer).try_save(0, 1)
