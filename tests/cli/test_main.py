"""The `hfai` command itself: quick to answer, and brief when asked for what it does not have."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

import pytest

RUNS = 7


def seconds(*arguments: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return time.perf_counter() - start


def hfai(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hfai", *arguments], capture_output=True, text=True, timeout=60
    )


def test_help_answers_within_a_quarter_of_a_second_beyond_python_itself() -> None:
    # In turn, so that what else the machine does meets both alike.
    pairs = [(seconds("-m", "hfai", "--help"), seconds("-c", "pass")) for _ in range(RUNS)]
    assert statistics.median(ours - bare for ours, bare in pairs) < 0.25


def test_help_imports_no_torch_and_lists_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "hfai", "--help"],
        capture_output=True,
        text=True,
        check=True,
    )
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "click" in imported
    assert not {"torch", "numpy", "rich"} & imported
    for command in ("demo", "doctor"):
        assert f"  {command} " in done.stdout


@pytest.mark.parametrize("option", ["--help", "-h"])
def test_both_spellings_of_help_work_everywhere(option: str) -> None:
    for arguments in ([option], ["demo", option], ["doctor", option]):
        done = hfai(*arguments)
        assert done.returncode == 0
        assert done.stdout.startswith("Usage:")


def test_the_version_is_that_of_the_package() -> None:
    import hfai as package

    assert hfai("--version").stdout.strip().endswith(package.__version__)


def test_an_unknown_command_is_refused_in_one_line() -> None:
    done = hfai("trian")
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
    assert "trian" in done.stderr
