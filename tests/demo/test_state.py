"""The stopped run: goes on to the same bits, and is whole or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfai import checkpoint
from hfai.demo.batches import Batch
from hfai.demo.settings import Settings
from hfai.demo.state import RunState
from hfai.demo.train import Trainer


@pytest.fixture
def saved(trainer: Trainer, settings: Settings, on_device: list[Batch], tmp_path: Path) -> Path:
    """The checkpoint of a run after two steps."""
    losses = [trainer.step(batch, 1e-3).item() for batch in on_device[:2]]
    state = RunState(
        settings,
        "digest",
        losses,
        {"consumed": 8},
        1.5,
        trainer.model.state_dict(),
        trainer.optimizer.state_dict(),
    )
    state.save(tmp_path / "resume")
    return tmp_path / "resume"


def test_what_is_saved_is_loaded(saved: Path, settings: Settings, trainer: Trainer) -> None:
    state = RunState.load(saved)
    assert state.settings == settings
    assert (state.corpus_digest, len(state.losses), state.seconds) == ("digest", 2, 1.5)
    assert state.place == {"consumed": 8}
    for name, tensor in trainer.model.state_dict().items():
        assert torch.equal(state.model[name], tensor.cpu())


@pytest.mark.parametrize("device", [torch.device("cpu")])
def test_the_next_step_is_that_of_an_unbroken_run(
    saved: Path, trainer: Trainer, make_trainer: Callable[[], Trainer], on_device: list[Batch]
) -> None:
    state = RunState.load(saved)
    resumed = make_trainer()
    resumed.model.load_state_dict(state.model)
    resumed.optimizer.load_state_dict(state.optimizer)
    for batch in on_device:
        assert torch.equal(resumed.step(batch, 1e-3), trainer.step(batch, 1e-3))
    for mine, other in zip(resumed.model.parameters(), trainer.model.parameters(), strict=True):
        assert torch.equal(mine, other)


def test_saving_replaces_the_old_state_and_leaves_nothing_else(saved: Path) -> None:
    state = RunState.load(saved)
    state.losses.append(1.0)
    state.save(saved)
    assert len(RunState.load(saved).losses) == 3
    assert list(saved.parent.iterdir()) == [saved]


def test_what_is_not_there_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunState.load(tmp_path / "resume")


def test_every_flipped_bit_is_noticed_or_harmless(saved: Path) -> None:
    whole = RunState.load(saved)
    noticed, places = 0, 0
    for file in sorted(saved.iterdir()):
        content = file.read_bytes()
        for place in range(0, len(content), max(1, len(content) // 10)):
            places += 1
            broken = bytearray(content)
            broken[place] ^= 0x10
            file.write_bytes(broken)
            try:
                state = RunState.load(saved)
            except ValueError as error:
                assert str(saved) in str(error)  # noqa: PT017  # some bits lie in unused padding
                assert "without --resume" in str(error)  # noqa: PT017
                noticed += 1
            else:
                for name, tensor in whole.model.items():
                    assert torch.equal(state.model[name], tensor)
        file.write_bytes(content)
    assert noticed > 0.9 * places


def test_a_file_is_refused_in_words(tmp_path: Path) -> None:
    (tmp_path / "resume").write_bytes(b"hello")
    with pytest.raises(ValueError, match=r"resume cannot be resumed from .*remove it"):
        RunState.load(tmp_path / "resume")


def test_another_checkpoint_is_refused_in_words(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "resume", {"w": torch.ones(3)}, step=3)
    with pytest.raises(ValueError, match=r"cannot be resumed from .*no format"):
        RunState.load(tmp_path / "resume")


def test_a_directory_that_is_no_checkpoint_is_not_replaced(saved: Path, tmp_path: Path) -> None:
    state = RunState.load(saved)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").write_text("mine")
    with pytest.raises(FileExistsError, match="no checkpoint"):
        state.save(tmp_path / "mine")
    assert (tmp_path / "mine" / "notes").read_text() == "mine"


def test_a_finished_run_leaves_nothing(saved: Path) -> None:
    RunState.remove(saved)
    assert list(saved.parent.iterdir()) == []
    RunState.remove(saved)
