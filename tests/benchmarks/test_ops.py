"""`python benchmarks/ops.py` as a user runs it, on the CPU."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.conftest import ROOT, one_thread

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def finished(
    run_script: Run, tmp_path_factory: pytest.TempPathFactory
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """One run on the smallest published case, and the file it wrote."""
    out = tmp_path_factory.mktemp("results")
    arguments = ["--op", "layer_norm", "--quick", "--device", "cpu", "--cases", "64×768"]
    done = run_script("ops.py", *arguments, "--out", out, "--seed", "7")
    (path,) = out.glob("*/layer_norm.json")
    document: dict[str, Any] = json.loads(path.read_text())
    assert path.parent.name == document["machine"]["slug"]
    return done, document


def test_a_run_prints_a_table_and_ends_with_status_0(
    finished: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    done, _ = finished
    assert done.returncode == 0, done.stderr
    assert "Whole call in eager" in done.stdout
    assert "hfai ran torch's own path" in done.stdout
    assert "liger was left out: runs on a GPU only" in done.stdout


def test_the_file_names_machine_versions_command_date_and_commit(
    finished: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, document = finished
    assert document["complete"] is True
    assert document["command"].startswith("python benchmarks/ops.py --op layer_norm --quick")
    assert document["machine"]["name"]
    assert {"python", "torch", "hfai", "numpy"} <= set(document["versions"])
    assert document["date"].endswith("+00:00")
    assert "commit" in document
    assert document["seed"] == 7
    assert document["ceilings"]["bytes_per_second"] > 0


def test_the_file_holds_errors_and_medians_of_every_implementation(
    finished: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, document = finished
    (case,) = document["cases"]
    assert (case["name"], case["shape"]) == ("64x768 fp32", [64, 768])
    rows = {row["name"]: row for row in case["implementations"]}
    for name in ("torch", "hfai"):
        assert set(rows[name]["errors"]) == {"y", "dx", "dweight", "dbias"}
        assert max(rows[name]["errors"].values()) < 1e-5
        both = rows[name]["call"]["both"]
        assert 0 < both["lower_quartile_ms"] <= both["median_ms"] <= both["upper_quartile_ms"]
    assert rows["liger"]["status"] == "absent"


def test_a_cpu_run_without_out_writes_nothing(run_script: Run) -> None:
    before = sorted((ROOT / "benchmarks" / "results").rglob("*"))
    arguments = ["--op", "rms_norm", "--grid", "--device", "cpu", "--cases", "1x32 fp32"]
    done = run_script("ops.py", *arguments)
    assert done.returncode == 0, done.stderr
    assert "1x32 fp32" in done.stdout
    assert "written to" not in done.stdout
    assert sorted((ROOT / "benchmarks" / "results").rglob("*")) == before


@pytest.mark.parametrize(
    ("sent", "status"), [(signal.SIGKILL, -signal.SIGKILL), (signal.SIGINT, 130)], ids=str
)
def test_a_run_that_is_stopped_keeps_what_it_measured(
    tmp_path: Path, sent: signal.Signals, status: int
) -> None:
    command = [sys.executable, ROOT / "benchmarks" / "ops.py", "--op", "layer_norm", "--grid"]
    process = subprocess.Popen(
        [*command, "--device", "cpu", "--out", tmp_path],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env=one_thread(),
    )
    try:
        deadline = time.monotonic() + 100
        while not (found := list(tmp_path.glob("*/layer_norm_grid.json"))):
            assert process.poll() is None
            assert time.monotonic() < deadline, "no result file appeared"
            time.sleep(0.05)
        time.sleep(0.3)
    finally:
        process.send_signal(sent)
        _, words = process.communicate(timeout=60)
    assert process.returncode == status
    assert "Traceback" not in words
    document = json.loads(found[0].read_text())
    assert document["complete"] is False
    assert 1 <= len(document["cases"]) < 120
    assert document["cases"][0]["implementations"][0]["call"]["both"]["median_ms"] > 0


def test_a_time_budget_stops_after_the_case_in_progress(run_script: Run, tmp_path: Path) -> None:
    arguments = ["--op", "layer_norm", "--grid", "--device", "cpu", "--cases", "1x"]
    done = run_script("ops.py", *arguments, "--out", tmp_path, "--time-budget", "0.001")
    assert done.returncode == 0, done.stderr
    assert "--time-budget is used up: 30 cases were not measured" in done.stdout


def test_missing_measures_what_the_file_lacks_and_keeps_the_rest(
    run_script: Run, tmp_path: Path
) -> None:
    arguments = ["--op", "layer_norm", "--grid", "--device", "cpu", "--out", tmp_path]
    arguments += ["--cases", "1x1000 fp32"]
    assert run_script("ops.py", *arguments).returncode == 0
    (path,) = tmp_path.glob("*/layer_norm_grid.json")
    (before,) = json.loads(path.read_text())["cases"]
    done = run_script("ops.py", *arguments, "--cases", "1x1000 bf16", "--missing")
    assert done.returncode == 0, done.stderr
    after = json.loads(path.read_text())["cases"]
    assert [case["name"] for case in after] == ["1x1000 bf16", "1x1000 fp32"]
    assert after[1] == before


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--op", "lstmm"], "'lstmm' is not one of 'gru', 'gru_cell', 'layer_norm', 'lstm'"),
        ([], "Missing option '--op'"),
        (["--op", "layer_norm", "--cases", "7x7"], "the names are 25600x1024 fp32, "),
        (["--op", "layer_norm", "--time-budget", "0"], "'--time-budget'"),
    ],
    ids=["operator", "none", "case", "budget"],
)
def test_wrong_arguments_are_refused_with_what_is_right(
    run_script: Run, arguments: list[str], words: str
) -> None:
    done = run_script("ops.py", *arguments)
    assert done.returncode == 2
    assert words in done.stderr
    assert "Traceback" not in done.stderr
