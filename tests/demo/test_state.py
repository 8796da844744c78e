"""The resume file: goes on to the same bits, and is whole or refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfai.demo.batches import Batch
from hfai.demo.settings import Settings
from hfai.demo.state import RunState
from hfai.demo.train import Trainer


@pytest.fixture
def saved(trainer: Trainer, settings: Settings, on_device: list[Batch], tmp_path: Path) -> Path:
    """The resume file of a run after two steps."""
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
    state.save(tmp_path / "resume.pt")
    return tmp_path / "resume.pt"


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


def test_a_missing_file_is_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        RunState.load(tmp_path / "resume.pt")


def test_every_flipped_bit_is_noticed(saved: Path) -> None:
    whole = saved.read_bytes()
    noticed = 0
    places = range(100, len(whole) - 100, len(whole) // 40)
    for place in places:
        broken = bytearray(whole)
        broken[place] ^= 0x10
        saved.write_bytes(broken)
        try:
            state = RunState.load(saved)
        except ValueError as error:
            assert str(saved) in str(error)  # noqa: PT017  # some bits lie in unused padding
            assert "without --resume" in str(error)  # noqa: PT017
            noticed += 1
        else:
            saved.write_bytes(whole)
            intact = RunState.load(saved)
            for name, tensor in intact.model.items():
                assert torch.equal(state.model[name], tensor)
    assert noticed > 0.9 * len(places)


@pytest.mark.parametrize("content", [b"", b"hello", b"PK\x03\x04 not a zip file"])
def test_another_file_is_refused_in_words(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "resume.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"resume\.pt cannot be resumed from .*remove it"):
        RunState.load(tmp_path / "resume.pt")


def test_a_truncated_file_is_refused_in_words(saved: Path) -> None:
    saved.write_bytes(saved.read_bytes()[:-1000])
    with pytest.raises(ValueError, match="cannot be resumed from"):
        RunState.load(saved)


@pytest.mark.parametrize(
    "content",
    [{"weights": torch.zeros(3)}, torch.zeros(3), {"format": "hfai-demo-resume-0"}],
    ids=["some model", "a tensor", "another format"],
)
def test_another_torch_file_is_refused_in_words(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "resume.pt")
    with pytest.raises(ValueError, match=r"resume\.pt cannot be resumed from"):
        RunState.load(tmp_path / "resume.pt")


def test_a_file_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    class Malicious:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, (str(tmp_path / "ran"), "w")

    torch.save({"format": "hfai-demo-resume-1", "settings": Malicious()}, tmp_path / "resume.pt")
    with pytest.raises(ValueError, match="cannot be resumed from"):
        RunState.load(tmp_path / "resume.pt")
    assert not (tmp_path / "ran").exists()
