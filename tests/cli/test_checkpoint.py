"""`hfai checkpoint`, run as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from hfai import checkpoint
from hfai.cli import main
from tests.checkpoint.training import Training

Run = Callable[..., "tuple[str, str]"]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command; return stdout and stderr."""

    def call(*arguments: object, code: int = 0) -> tuple[str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["checkpoint", *map(str, arguments)])
        out, err = capsys.readouterr()
        assert (ended.value.code or 0) == code, err
        return out, err

    return call


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("runs")
    training = Training()
    with checkpoint.CheckpointManager(directory, keep=None, asynchronous=False) as manager:
        for step in (1, 2, 3):
            training.steps(step > 1)
            manager.save(step, *training.parts(), others={"note": "x"})
    return directory


def test_list_and_show(runs: Path, run: Run) -> None:
    out, _ = run("list", runs)
    assert [line.split()[0] for line in out.splitlines()] == [
        f"step-{step:08d}" for step in (1, 2, 3)
    ]
    listed = json.loads(run("list", runs, "--json")[0])
    assert [row["step"] for row in listed["checkpoints"]] == [1, 2, 3]
    out, _ = run("show", runs / "step-00000003")
    assert "model/inner.weight" in out
    assert "the same tensor as model/embedding.weight" in out
    shown = json.loads(run("show", runs / "step-00000003", "--json")[0])
    assert shown["tensors"]["model/inner.weight"]["shape"] == [16, 16]
    assert shown["values"] == ["note"]


def test_verify_exits_with_1_and_names_what_is_damaged(
    runs: Path, tmp_path: Path, run: Run
) -> None:
    out, err = run("verify", runs)
    assert out.count("every byte is as written") == 3
    assert err == ""
    path = tmp_path / "a"
    checkpoint.save(path, {"w": torch.ones(5000)}, rng=False)
    shard = path / "rank-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-4097] ^= 1
    shard.write_bytes(data)
    (path / "rank-00007.json").write_text("stale, of a larger world")
    out, err = run("verify", path, code=1)
    assert "damaged in model/w" in err
    assert "rank-00007.json belongs to no checkpoint" in err
    found = json.loads(run("verify", path, "--json", code=1)[0])
    assert found["checkpoints"][0]["damaged"][0]["tensor"] == "model/w"
    assert checkpoint.load(path, verify=False)["model"]["w"].shape == (5000,)


def test_verify_of_a_directory_names_a_checkpoint_without_its_commit_record(
    tmp_path: Path, run: Run
) -> None:
    for name in ("a", "b"):
        checkpoint.save(tmp_path / name, {"w": torch.ones(3)}, rng=False)
    (tmp_path / "b" / "COMMIT").unlink()
    out, err = run("verify", tmp_path, code=1)
    assert f"{tmp_path}/b/COMMIT is missing: without it there is no checkpoint" in err
    assert f"{tmp_path}/a: " in out
    (tmp_path / "a" / "COMMIT").unlink()
    found = json.loads(run("verify", tmp_path, "--json", code=1)[0])
    assert found["damaged"] == 2


def test_diff_exits_with_3_where_tensors_differ(runs: Path, run: Run) -> None:
    one, two = runs / "step-00000001", runs / "step-00000002"
    assert "0 differ" in run("diff", one, one)[0]
    out, _ = run("diff", one, two, code=3)
    assert "≠ model/inner.weight" in out
    assert "+ optimizer/state/inner.weight/exp_avg" in out


def test_diff_calls_no_damaged_checkpoint_the_same(tmp_path: Path, run: Run) -> None:
    for name in ("good", "bad"):
        checkpoint.save(tmp_path / name, {"w": torch.arange(5000.0)}, rng=False)
    good, bad = tmp_path / "good", tmp_path / "bad"
    run("diff", good, bad)
    shard = bad / "rank-00000.safetensors"
    data = shard.read_bytes()
    position = len(data) - 5000
    for content in (
        data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :],
        data[:5000],
        None,
    ):
        shard.unlink()
        if content is not None:
            shard.write_bytes(content)
        for pair in ((good, bad), (bad, good)):
            out, err = run("diff", *pair, code=1)
            assert out == ""
            assert str(shard) in err
            assert len(err.splitlines()) == 1


def test_diff_reports_values_that_are_no_tensors(tmp_path: Path, run: Run) -> None:
    model = {"w": torch.ones(3)}
    seen = {8, 16, 24, 0}  # which collide in a set's table, so that their order is that of adding
    others = {"lr": 1.0, "same": [1, {2: 3}], "list": [1, 2], "seen": seen}
    checkpoint.save(tmp_path / "one", model, rng=False, step=1, others=others)
    others = {"lr": 1, "same": [1, {2: 3}], "list": [1, 5], "seen": {24, 16, 8, 0}}
    checkpoint.save(tmp_path / "two", model, rng=False, step=2, others={**others, "new": None})
    out, _ = run("diff", tmp_path / "one", tmp_path / "two", code=3)
    assert "1 tensors are the same, 0 differ" in out
    found = json.loads(run("diff", tmp_path / "one", tmp_path / "two", "--json", code=3)[0])
    assert found["values"] == ["step", "others/lr", "others/list/1", "others/new"]


def test_list_marks_a_checkpoint_that_lacks_a_file(tmp_path: Path, run: Run) -> None:
    for name in ("good", "gone", "cut"):
        checkpoint.save(tmp_path / name, {"w": torch.ones(3)}, rng=False)
    (tmp_path / "gone" / "rank-00000.safetensors").unlink()
    os.truncate(tmp_path / "cut" / "rank-00000.safetensors", 100)
    lines = run("list", tmp_path, code=1)[0].splitlines()
    assert ["damaged: rank-00000.safetensors" in line for line in lines] == [True, True, False]
    assert lines[0].startswith("cut ")
    assert "rank-00000.safetensors is missing" in lines[2 - 1]
    assert json.loads(run("list", tmp_path, "--json", code=1)[0])["damaged"] == 2


def test_names_are_printed_with_control_characters_escaped(tmp_path: Path, run: Run) -> None:
    odd = {"a\x1b[31m\nb ü": torch.ones(1), "w": torch.ones(1)}
    checkpoint.save(tmp_path / "odd", odd, rng=False, others={"x\n": 1})
    checkpoint.save(tmp_path / "plain", {"w": torch.ones(1)}, rng=False)
    out, _ = run("show", tmp_path / "odd")
    assert "model/a\\x1b[31m\\nb ü  float32" in out
    assert "others   x\\n" in out
    assert "\x1b" not in out
    out, _ = run("diff", tmp_path / "odd", tmp_path / "plain", code=3)
    assert out.splitlines()[0] == "- model/a\\x1b[31m\\nb ü"


def test_convert_keeps_members_whose_names_meet(tmp_path: Path, run: Run) -> None:
    content = {"model": {"w": torch.ones(1)}, "rng": torch.tensor(1), "rng_": torch.tensor(2)}
    torch.save(content, tmp_path / "a.pt")
    run("convert", tmp_path / "a.pt", tmp_path / "a")
    loaded = checkpoint.load(tmp_path / "a")
    assert (int(loaded["rng_"]), int(loaded["rng__"])) == (2, 1)


@pytest.mark.filterwarnings("error")
def test_convert_of_a_damaged_distributed_checkpoint_is_one_line(tmp_path: Path, run: Run) -> None:
    from tests.checkpoint.test_convert import save_dcp

    source = tmp_path / "dcp"
    save_dcp(source, {"model": {"w": torch.ones(1000)}})
    assert run("convert", source, tmp_path / "good")[1] == ""
    (file,) = source.glob("*.distcp")
    for damage in (lambda: os.truncate(file, 100), file.unlink):
        damage()
        _, err = run("convert", source, tmp_path / "bad", code=1)
        assert f"{source} cannot be read, a file in it is damaged or missing: " in err
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "bad").exists()


def test_convert_from_torch_and_to_safetensors(runs: Path, tmp_path: Path, run: Run) -> None:
    from safetensors.torch import load_file

    training = Training(seed=2)
    training.steps(1)
    model, optimizer, _ = training.parts()
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 4}
    torch.save(content, tmp_path / "old.pt")
    run("convert", tmp_path / "old.pt", tmp_path / "new")
    loaded = checkpoint.load(tmp_path / "new")
    assert loaded["epoch"] == 4
    optimizer.load_state_dict(loaded["optimizer"])
    other = Training(seed=3)
    checkpoint.load_into(tmp_path / "new", other.model)
    assert torch.equal(other.model.inner.weight, model.inner.weight)
    run("convert", tmp_path / "new", tmp_path / "model.safetensors")
    exported = load_file(tmp_path / "model.safetensors")
    assert exported.keys() == model.state_dict().keys()
    assert torch.equal(exported["inner.weight"], model.inner.weight)
    assert "exists" in run("convert", tmp_path / "old.pt", tmp_path / "new", code=2)[1]
    torch.save({"model": Training().model}, tmp_path / "pickled.pt")
    assert "no torch.save file of plain values" in run(
        "convert", tmp_path / "pickled.pt", tmp_path / "x", code=1
    )[1]  # fmt: skip
    assert not (tmp_path / "x").exists()
    torch.save({"model": model.state_dict(), "rng": [1, 2]}, tmp_path / "rng.pt")
    run("convert", tmp_path / "rng.pt", tmp_path / "rng")
    assert checkpoint.load(tmp_path / "rng")["rng_"] == [1, 2], "the name is a checkpoint's own"


def test_convert_from_torchs_distributed_checkpoint(tmp_path: Path, run: Run) -> None:
    from torch.distributed import checkpoint as dcp

    training = Training()
    training.steps(1)
    model, optimizer, _ = training.parts()
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "list": [1, {"a": 2}]}
    dcp.save(state, checkpoint_id=tmp_path / "dcp")  # type: ignore[attr-defined]
    run("convert", tmp_path / "dcp", tmp_path / "new")
    other = Training(seed=3)
    checkpoint.load_into(tmp_path / "new", other.model)
    assert torch.equal(other.model.inner.weight, model.inner.weight)
    assert checkpoint.load(tmp_path / "new")["list"] == [1, {"a": 2}]
    (tmp_path / "other").mkdir()
    assert "no .metadata" in run("convert", tmp_path / "other", tmp_path / "y", code=1)[1]


def test_prune_removes_what_is_not_kept(tmp_path: Path, run: Run) -> None:
    with checkpoint.CheckpointManager(tmp_path, keep=None, asynchronous=False) as manager:
        for step in range(1, 6):
            manager.save(step, {"w": torch.ones(1)})
    (tmp_path / ".step-00000009.x.tmp").mkdir()
    out, _ = run("prune", tmp_path, "--keep", 2, "--keep-every", 3, "--dry-run")
    assert out.splitlines() == ["would remove step-00000001", "would remove step-00000002"]
    out, _ = run("prune", tmp_path, "--keep", 2, "--keep-every", 3)
    assert "removed .step-00000009.x.tmp, which was never finished" in out
    assert sorted(os.listdir(tmp_path)) == [f"step-{step:08d}" for step in (3, 4, 5)]


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("list", "/no/such"), 1, "no such directory: /no/such"),
        (("show", "/no/such"), 1, "no checkpoint at /no/such"),
        (("verify", "/no/such"), 1, "no checkpoint at /no/such"),
        (("diff", "/no/such", "/no/such"), 1, "no checkpoint at /no/such"),
        (("convert", "/no/such", "/no/x"), 1, "no such file or directory: /no/such"),
        (("prune", "/no/such"), 2, "--keep"),
        (("prune", "/no/such", "--keep", "1"), 1, "no such directory"),
        (("nothing",), 2, "nothing"),
        (("show", "nosuch://x/y"), 1, "nosuch"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    arguments: tuple[str, ...], code: int, words: str, run: Run
) -> None:
    _, err = run(*arguments, code=code)
    assert words in err
    assert len(err.splitlines()) == 1


def test_looking_at_checkpoints_needs_no_torch(runs: Path) -> None:
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from hfai.cli import main\n"
        f"main(['checkpoint', 'verify', {str(runs)!r}])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
