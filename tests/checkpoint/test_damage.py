"""No damage is loaded without a word: every kind of byte flipped, files cut, mixed and lost."""

from __future__ import annotations

import errno
import json
import os
import shutil
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hfai import checkpoint
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.errors import is_damage
from hfai.checkpoint.format import decode_commit, digest
from hfai.checkpoint.verify import verify
from tests.checkpoint.test_manager import in_child
from tests.checkpoint.training import Training, same

# All bytes of all files:
# HFAI_CHECKPOINT_FLIPS=all pytest --timeout=0 tests/checkpoint/test_damage.py
ALL = os.environ.get("HFAI_CHECKPOINT_FLIPS") == "all"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("damage") / "a"
    state = {"large": torch.randn(5000), "odd": torch.randn(1500), "small": torch.randn(3)}
    checkpoint.save(path, state, others={"epoch": 2, "t": torch.arange(4)}, step=1)
    return path


def positions(path: Path) -> Iterator[tuple[str, int]]:
    """Positions of every class: each file's beginning, end and middle, headers, data, gaps."""
    index = json.loads((path / "rank-00000.json").read_bytes())
    for name in sorted(os.listdir(path)):
        size = (path / name).stat().st_size
        chosen = {0, 1, 7, 8, 9, size // 3, size // 2, size - 2, size - 1}
        if name.endswith(".safetensors"):
            chosen |= {index["header"] - 1, index["header"]}
            for row in index["tensors"]:
                begin, length = row[5], row[6]
                chosen |= {begin, begin + length // 2, begin + length - 1}
                if begin + length < size:
                    chosen.add(begin + length)  # of the next tensor, or of a gap
        else:
            chosen |= set(range(0, size, 37))
        for position in range(size) if ALL else sorted(p for p in chosen if 0 <= p < size):
            yield name, position


def test_a_flip_at_any_position_class_is_found(saved: Path, tmp_path: Path) -> None:
    good = checkpoint.load(saved)["model"]
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    refused, named = 0, []
    for name, position in positions(saved):
        file = copy / name
        data = bytearray(file.read_bytes())
        data[position] ^= 1 << (position % 8)
        file.write_bytes(data)
        try:
            with CheckpointFiles(copy) as files:
                assert verify(files, 1), f"verify did not see byte {position} of {name}"
        except checkpoint.DamagedCheckpointError:
            pass
        try:
            # Damage in the gaps between tensors changes no tensor.
            assert same(checkpoint.load(copy)["model"], good), f"byte {position} of {name}"
        except checkpoint.DamagedCheckpointError as error:
            refused += 1
            named.append(name in error.path and name in str(error))
        data[position] ^= 1 << (position % 8)
        file.write_bytes(data)
    assert refused > 100
    assert all(named), "every error names the file"
    assert same(checkpoint.load(copy)["model"], good)


def test_the_error_names_file_tensor_and_place(saved: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    with CheckpointFiles(saved) as files:
        ((_, piece),) = files.slices()["model/large"]
    shard = copy / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[piece.begin + 77] ^= 4
    shard.write_bytes(data)
    with pytest.raises(checkpoint.DamagedCheckpointError) as caught:
        checkpoint.load(copy)
    assert caught.value.path == str(shard)
    assert (caught.value.tensor, caught.value.offset) == ("model/large", piece.begin)
    assert torch.equal(
        checkpoint.load_tensor(copy, "model/odd"), checkpoint.load_tensor(saved, "model/odd")
    )
    salvaged = checkpoint.load(copy, verify=False)["model"]["large"]
    assert (salvaged != checkpoint.load_tensor(saved, "model/large")).sum() == 1


@pytest.mark.parametrize(
    "name", ["COMMIT", "state.json", "rank-00000.json", "rank-00000.safetensors"]
)
@pytest.mark.parametrize("left", [0, 1, 100, -1])
def test_a_file_that_was_cut_short_is_refused(
    name: str, left: int, saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved, tmp_path / "a")
    path = tmp_path / "a" / name
    os.truncate(path, left if left >= 0 else path.stat().st_size + left)
    with pytest.raises(checkpoint.DamagedCheckpointError, match=name):
        checkpoint.load(tmp_path / "a")


@pytest.mark.parametrize("name", ["state.json", "rank-00000.json", "rank-00000.safetensors"])
def test_a_missing_file_is_named(name: str, saved: Path, tmp_path: Path) -> None:
    shutil.copytree(saved, tmp_path / "a")
    (tmp_path / "a" / name).unlink()
    with pytest.raises(checkpoint.DamagedCheckpointError, match=f"{name} is missing"):
        checkpoint.load(tmp_path / "a")


def test_files_of_two_saves_do_not_mix(tmp_path: Path) -> None:
    for name, value in (("a", 1.0), ("b", 2.0)):
        checkpoint.save(tmp_path / name, {"w": torch.full((5000,), value)}, rng=False)
    shutil.copy(tmp_path / "b" / "rank-00000.safetensors", tmp_path / "a")
    with pytest.raises(checkpoint.DamagedCheckpointError, match="header"):
        checkpoint.load(tmp_path / "a")
    shutil.copy(tmp_path / "b" / "rank-00000.json", tmp_path / "a")
    with pytest.raises(checkpoint.DamagedCheckpointError, match=r"rank-00000.json is damaged"):
        checkpoint.load(tmp_path / "a")


def test_resume_falls_back_to_the_checkpoint_before_and_says_why(tmp_path: Path) -> None:
    training = Training()
    with checkpoint.CheckpointManager(tmp_path, keep=1, asynchronous=False) as manager:
        training.steps(1)
        manager.save(1, *training.parts())
        good = training.tensors()
        training.steps(1)
        manager._keep = 2
        manager.save(2, *training.parts())
        shard = tmp_path / "step-00000002" / "rank-00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 1
        shard.write_bytes(data)
        other = Training(seed=9)
        with pytest.warns(UserWarning, match=r"step-00000002.* damaged in optimizer/state/"):
            loaded = manager.resume(*other.parts())
        assert loaded is not None
        assert loaded.step == 1
        assert same(other.tensors(), good)
        with pytest.raises(checkpoint.DamagedCheckpointError):
            manager.resume(*other.parts(), fallback=False)
        # The next save is the newest, though a damaged one has a later step.
        manager._keep = 1
        shutil.copytree(tmp_path / "step-00000002", tmp_path / "step-00000009")
        manager.save(3, *training.parts())
        assert manager.steps() == [3, 9]
        os.truncate(tmp_path / "step-00000003" / "COMMIT", 5)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises(checkpoint.DamagedCheckpointError):
                manager.resume(*other.parts())


class Grown(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, 64) for _ in range(layers))


def test_what_the_older_checkpoint_lacks_keeps_its_values(tmp_path: Path) -> None:
    with checkpoint.CheckpointManager(tmp_path, asynchronous=False) as manager:
        manager.save(1, Grown(1))
        manager.save(2, Grown(2))
        with CheckpointFiles(tmp_path / "step-00000002") as files:
            ((_, piece),) = files.slices()["model/layers.1.weight"]
        shard = tmp_path / "step-00000002" / "rank-00000.safetensors"
        data = bytearray(shard.read_bytes())
        data[piece.begin + 900] ^= 1
        shard.write_bytes(data)
        model = Grown(2)
        before = {name: tensor.clone() for name, tensor in model.layers[1].state_dict().items()}
        with pytest.warns(UserWarning, match="layers.1.weight"):
            loaded = manager.resume(model, strict=False)
    assert loaded is not None
    assert loaded.step == 1
    assert loaded.missing == ("model/layers.1.weight", "model/layers.1.bias")
    assert same(model.layers[1].state_dict(), before)


@pytest.mark.parametrize("name", ["COMMIT", "state.json", "rank-00000.safetensors"])
def test_a_file_that_may_not_be_read_is_no_damage(name: str, open_place: Path) -> None:
    manager = checkpoint.CheckpointManager(open_place, asynchronous=False)
    for step in (1, 2):
        manager.save(step, {"w": torch.full((2,), float(step))})
    (open_place / "step-00000002" / name).chmod(0)
    state = {"w": torch.zeros(2)}

    def work() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        for strict in (True, False):
            with pytest.raises(PermissionError, match=name):
                manager.resume(state, strict=strict)

    assert in_child(work) == 0


def test_errors_of_the_medium_are_damage_and_those_of_the_moment_are_not() -> None:
    for number in (errno.EIO, errno.ENOENT, errno.EBADMSG):
        assert is_damage(OSError(number, "x"))
    for number in (errno.EMFILE, errno.ENFILE, errno.EACCES, errno.ENOMEM, errno.ETIMEDOUT):
        assert not is_damage(OSError(number, "x"))
    assert is_damage(EOFError())
    assert is_damage(FileNotFoundError("a store's, without a number"))
    assert not is_damage(ConnectionError("the store does not answer"))
    assert not is_damage(MemoryError())


def test_resume_passes_over_a_checkpoint_whose_values_cannot_be_decoded(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    manager = checkpoint.CheckpointManager(tmp_path, asynchronous=False)
    for step in (1, 2):
        manager.save(step, model, others={"seen": {1}})
    # As a version with another mark would have written it, hashes and all.
    newest = tmp_path / "step-00000002"
    state = (newest / "state.json").read_bytes().replace(b'{"$set": [1]}', b'{"$set":[[1]]}')
    state = state.replace(b'{"$set":[1]}', b'{"$set":[[1]]}')
    (newest / "state.json").write_bytes(state)
    record = decode_commit((newest / "COMMIT").read_bytes(), "")
    files = {**record.files, "state.json": (len(state), digest(state))}
    (newest / "COMMIT").write_bytes(replace(record, files=files).encode())
    with pytest.raises(checkpoint.CheckpointError, match="step-00000002: a value cannot be dec"):
        checkpoint.load(newest)
    with pytest.warns(UserWarning, match="step-00000002 is not used, because its values cannot"):
        loaded = manager.resume(model)
    assert loaded is not None
    assert loaded.step == 1
    with pytest.raises(checkpoint.CheckpointError, match=r"others in .* cannot be decoded"):
        manager.resume(model, fallback=False)
