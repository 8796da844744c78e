"""`hfai demo` as a user runs it: real processes, real files, a real Ctrl-C."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hfai.cli.demo import share_cores
from hfai.demo.settings import Settings
from hfai.demo.state import RunState

# Enough to fall to the loss of guessing by frequency, in a second or two.
SMALL = ("--device", "cpu", "--steps", "60", "--batch-size", "16", "--length", "32", "--seed", "5")
# The length of SMALL: the text is packed once for both.
TINIEST = ("--device", "cpu", "--steps", "2", "--batch-size", "1", "--length", "32")
Done = subprocess.CompletedProcess[str]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One core, and a cache of the tests' own."""
    cache = str(tmp_path_factory.mktemp("cache"))
    return {**os.environ, "XDG_CACHE_HOME": cache, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}


@pytest.fixture(scope="module")
def demo(environment: dict[str, str]) -> Callable[..., Done]:
    """Return a function that runs `hfai demo` to its end."""

    def run(*arguments: object, **extra: str) -> Done:
        return subprocess.run(
            command(*arguments),
            capture_output=True,
            text=True,
            timeout=240,
            env={**environment, **extra},
        )

    return run


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("finished") / "below" / "out"


@pytest.fixture(scope="module")
def finished(demo: Callable[..., Done], out: Path) -> Done:
    """A run that was left alone, with --json."""
    return demo(*SMALL, "--json", "--out", out)


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "hfai", "demo", *map(str, arguments)]


def figures(out: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((out / "figures.json").read_text())
    return read


def run_and_signal(
    environment: dict[str, str], number: signal.Signals, after: str, arguments: list[str]
) -> Done:
    """Run a command, send it a signal once it has printed a line that begins with `after`."""
    with subprocess.Popen(
        arguments,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        # The tests may run in the background of a shell, which then ignores Ctrl-C.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        assert process.stdout is not None
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line.startswith(after):
                break
        process.send_signal(number)
        lines.extend(process.stdout)
        return Done(arguments, process.wait(timeout=60), "".join(lines))


@pytest.fixture(scope="module")
def stopped_out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stopped")


@pytest.fixture(scope="module")
def stopped(environment: dict[str, str], stopped_out: Path) -> Done:
    """The same run as `finished`, stopped by Ctrl-C after a step or a few."""
    arguments = command(*SMALL, "--out", stopped_out)
    return run_and_signal(environment, signal.SIGINT, "training: step", arguments)


def test_it_finishes_and_says_so(finished: Done, out: Path) -> None:
    assert finished.returncode == 0, finished.stderr
    names = sorted(path.name for path in out.iterdir())
    assert names == ["figures.json", "loss.png", "model.pt"]
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_json_is_one_object_on_stdout_and_in_the_file(finished: Done, out: Path) -> None:
    assert finished.stdout == (out / "figures.json").read_text()
    assert json.loads(finished.stdout)["settings"]["steps"] == 60
    assert "training: step" in finished.stderr


def test_the_loss_falls_clearly(finished: Done, out: Path) -> None:
    training = figures(out)["training"]
    assert len(training["losses"]) == training["steps_done"] == 60
    assert training["first_loss"] == training["losses"][0] == pytest.approx(5.58, abs=0.1)
    assert training["last_loss"] < 3.5


def test_torch_and_hfai_are_compared_on_the_same_weights(finished: Done, out: Path) -> None:
    comparison = figures(out)["comparison"]
    torch_side, hfai_side = comparison["torch"], comparison["hfai"]
    assert len(torch_side["blocks"]) == len(hfai_side["blocks"]) == len(comparison["ratios"]) > 5
    assert torch_side["held_out_loss"] == pytest.approx(hfai_side["held_out_loss"], rel=1e-4)
    assert 0.1 < comparison["ratio"] < 10
    layers = figures(out)["layers"]
    assert layers["swapped"]["LayerNorm"] == 6
    assert {path["path"] for path in layers["paths"]} == {"torch"}
    assert all(path["reason"] for path in layers["paths"])


def test_figures_name_machine_versions_and_command(finished: Done, out: Path) -> None:
    read = figures(out)
    assert read["machine"]["cpu"]
    assert read["machine"]["torch_threads"] == 1
    assert read["versions"]["torch"] == torch.__version__
    assert read["command"].startswith("hfai demo --device cpu --steps 60")
    assert read["peak_memory_bytes"] > 50_000_000
    assert [check["passed"] for check in read["checks"]] == [True, True]


def test_the_saved_model_is_plain_torchs(finished: Done, out: Path) -> None:
    state = torch.load(out / "model.pt", weights_only=True)
    Settings(**figures(out)["settings"]).make_model().load_state_dict(state, strict=True)
    trip = figures(out)["round_trip"]
    assert trip["converted_loss"] == trip["loaded_loss"]


def test_ctrl_c_leaves_all_there_is(stopped: Done, stopped_out: Path) -> None:
    assert stopped.returncode == 130, stopped.stdout
    assert "add --resume to go on" in stopped.stdout
    assert "torch against hfai: not measured" in stopped.stdout
    names = sorted(path.name for path in stopped_out.iterdir())
    assert names == ["figures.json", "loss.png", "resume"]
    read = figures(stopped_out)
    assert 1 <= read["training"]["steps_done"] == len(read["training"]["losses"]) < 60
    assert read["interrupted"] is True
    assert read["comparison"] is None
    place = RunState.load(stopped_out / "resume").place  # in the middle of the first epoch
    assert (place["epoch"], place["consumed"]) == (0, 16 * read["training"]["steps_done"])
    assert place["consumed"] < place["n"]


def test_a_run_stopped_twice_ends_with_the_same_bits_as_an_unbroken_one(
    demo: Callable[..., Done],
    finished: Done,
    out: Path,
    stopped: Done,
    stopped_out: Path,
    tmp_path: Path,
) -> None:
    shutil.copytree(stopped_out / "resume", tmp_path / "resume")
    first = figures(stopped_out)["training"]["steps_done"]
    arguments = ("--resume", "--device", "cpu", "--out", tmp_path)
    second = first + 5
    again = demo(*arguments, "--suspend-after", second)
    assert again.returncode == 75, again.stderr
    assert again.stderr.splitlines() == [
        "suspended (SIGUSR1): exit code 75, which means start me again"
    ]
    assert f"going on after step {first} of 60" in again.stdout
    assert f"stopped after step {second} of 60: add --resume to go on" in again.stdout
    assert figures(tmp_path)["training"]["steps_done"] == second

    # The same command once more, as whoever suspended it would: it is not suspended again.
    done = demo(*arguments, "--suspend-after", second)
    assert done.returncode == 0, done.stderr
    training = figures(tmp_path)["training"]
    assert training["resumed_from"] == second
    assert training["losses"] == figures(out)["training"]["losses"]
    assert not (tmp_path / "resume").exists()
    ours = torch.load(tmp_path / "model.pt", weights_only=True)
    unbroken = torch.load(out / "model.pt", weights_only=True)
    assert list(ours) == list(unbroken)
    assert all(torch.equal(ours[name], unbroken[name]) for name in ours)


def test_two_processes_stopped_and_resumed_come_to_the_losses_of_one(
    demo: Callable[..., Done],
    environment: dict[str, str],
    finished: Done,
    out: Path,
    tmp_path: Path,
) -> None:
    arguments = (*SMALL, "--nprocs", "2", "--out", tmp_path)
    first = run_and_signal(environment, signal.SIGINT, "training: step", command(*arguments))
    assert first.returncode == 130, first.stdout
    second = demo("--nprocs", "2", "--resume", "--out", tmp_path)
    assert second.returncode == 0, second.stderr
    assert "for the average over 2 processes (hfreduce)" in second.stdout
    read, one = figures(tmp_path), figures(out)
    assert 0 < read["training"]["resumed_from"] < 60
    assert read["training"]["losses"] == pytest.approx(one["training"]["losses"], rel=1e-4)
    assert read["together"]["nprocs"] == 2
    assert 0 < read["together"]["waiting_share"] < 1
    assert one["together"] is None


def test_ctrl_c_before_the_first_step_is_one_line_and_writes_nothing(
    environment: dict[str, str], tmp_path: Path
) -> None:
    # A module that the job imports and that takes for ever to do so.
    (tmp_path / "resource.py").write_text(
        "import time; print('importing', flush=True); time.sleep(60)"
    )
    path = os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    arguments = command(*TINIEST, "--out", tmp_path / "out")
    done = run_and_signal(
        {**environment, "PYTHONPATH": path}, signal.SIGINT, "importing", arguments
    )
    assert done.returncode == 130
    assert done.stdout.splitlines() == [
        "importing",
        "Stopped before the first step: nothing was written.",
    ]
    assert not (tmp_path / "out").exists()


def test_the_table_says_why_both_sides_are_alike_and_how_to_get_the_picture(
    demo: Callable[..., Done], tmp_path: Path
) -> None:
    shadow = tmp_path / "shadow"
    (shadow / "matplotlib").mkdir(parents=True)
    (shadow / "matplotlib" / "__init__.py").write_text("raise ImportError('not installed')\n")
    path = os.pathsep.join(filter(None, [str(shadow), os.environ.get("PYTHONPATH", "")]))
    done = demo(*TINIEST, "--out", tmp_path / "out", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "out" / "loss.png").exists()
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("no loss.png")]
    assert "pip install matplotlib" in line
    assert "hfai / torch" in done.stdout
    assert "6 LayerNorm on torch's path: " in done.stdout
    assert "both sides ran torch's code" in done.stdout
    assert "\x1b" not in done.stdout


REFUSED = {
    "suspend": (
        ["--suspend-after", "5", "--steps", "5"],
        ["--suspend-after 5 was given", "the run has 5 steps: give at most 4"],
    ),
    "steps": (["--steps", "0"], ["--steps", "0 is not in the range"]),
    "length": (["--length", "1000000"], ["--length", "1000000 is not in the range"]),
    "rate": (["--learning-rate", "0"], ["--learning-rate", "0.0 is not in the range"]),
    "model": (
        ["--model", "huge"],
        ["--model", "'huge' is not one of 'tiny', 'base', 'large', 'lstm'"],
    ),
    "option": (["--stepz", "5"], ["No such option", "--stepz", "--steps"]),
    "nprocs": (["--nprocs", "3", "--device", "cpu"], ["--nprocs 3", "multiple of 3"]),
    "resume": (["--resume", "--out", "nowhere"], ["nowhere/resume does not exist", "--out"]),
}


@pytest.mark.parametrize(("arguments", "said"), REFUSED.values(), ids=REFUSED.keys())
def test_bad_arguments_are_refused_in_one_line(
    demo: Callable[..., Done], arguments: list[str], said: list[str]
) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    for words in said:
        assert words in done.stderr


def test_processes_within_torchruns_are_refused_in_one_line(demo: Callable[..., Done]) -> None:
    done = demo("--nprocs", "2", LOCAL_RANK="1", LOCAL_WORLD_SIZE="2")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--nprocs 2 was given, but LOCAL_RANK is set" in line
    assert "without torchrun" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_refused_in_one_line(demo: Callable[..., Done]) -> None:
    done = demo("--device", "cuda")
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "use --device cpu" in done.stderr


def test_resuming_as_something_else_is_refused_in_one_line(
    demo: Callable[..., Done], stopped: Done, stopped_out: Path
) -> None:
    before = (stopped_out / "resume" / "COMMIT").read_bytes()
    done = demo("--resume", "--model", "base", "--out", stopped_out)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--model base was given" in done.stderr
    assert "has tiny: leave --model out" in done.stderr
    assert (stopped_out / "resume" / "COMMIT").read_bytes() == before


def test_a_damaged_checkpoint_is_refused_in_one_line(
    demo: Callable[..., Done], stopped: Done, stopped_out: Path, tmp_path: Path
) -> None:
    shutil.copytree(stopped_out / "resume", tmp_path / "resume")
    shard = tmp_path / "resume" / "rank-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:-10])
    done = demo("--resume", "--out", tmp_path)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "resume cannot be resumed from" in done.stderr


def test_a_loss_that_is_no_number_is_a_failed_check(
    demo: Callable[..., Done], stopped: Done, stopped_out: Path, tmp_path: Path
) -> None:
    state = RunState.load(stopped_out / "resume")
    state.model["output_bias"].fill_(float("nan"))
    state.save(tmp_path / "resume")
    done = demo("--resume", "--device", "cpu", "--out", tmp_path)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("Error: the loss stays finite: the loss of step ")
    assert "use a lower --learning-rate than 0.002" in line
    assert figures(tmp_path)["training"]["losses"][-1] is None
    assert (tmp_path / "loss.png").exists()


def test_errors_show_a_traceback_only_when_asked(demo: Callable[..., Done], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    arguments = (*TINIEST, "--out", tmp_path / "file" / "out")
    done = demo(*arguments)
    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert "choose another directory with --out" in done.stderr
    done = demo(*arguments, "--debug")
    assert done.returncode == 1
    assert "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("environment", "count"),
    [({}, "2000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
)
def test_waiting_threads_give_way_unless_the_user_said_else(
    environment: dict[str, str], count: str | None
) -> None:
    share_cores(environment)
    assert environment.get("GOMP_SPINCOUNT") == count


def test_help_names_every_exit_code_and_needs_no_torch(environment: dict[str, str]) -> None:
    code = (
        "import sys; from hfai.cli import main\n"
        "try: main(['demo', '--help'])\n"
        "finally: print('torch' in sys.modules, file=sys.stderr)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0
    assert done.stderr.strip() == "False"
    for code in ("0 ", "1 ", "2 ", "75 ", "130 "):
        assert any(line.strip().startswith(code) for line in done.stdout.splitlines())
