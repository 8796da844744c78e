"""`hfai doctor` as a user runs it, on this machine and in broken installations."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Doctor = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    """Return a function that runs `hfai doctor`; `broken` packages raise what they are given."""

    def run(
        *arguments: str, broken: dict[str, str] | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        for package, statement in (broken or {}).items():
            (tmp_path / package).mkdir()
            (tmp_path / package / "__init__.py").write_text(f"{statement}\n")
        paths = [str(tmp_path), os.environ.get("PYTHONPATH", "")]
        return subprocess.run(
            [sys.executable, "-m", "hfai", "doctor", *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
        )

    return run


def parts(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the checks of a `--json` run by name."""
    return {check["name"]: check for check in json.loads(done.stdout)["checks"]}


def test_a_working_installation_is_ready(doctor: Doctor) -> None:
    done = doctor()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.split()[:2] == ["ok", "torch"] for line in lines)
    assert any(line.split()[:2] == ["ok", "NVRTC"] for line in lines)
    assert "Traceback" not in done.stderr


def test_json_says_the_same_to_scripts(doctor: Doctor) -> None:
    done = doctor("--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["ready"] is True
    torchs = parts(done)["torch"]
    assert set(torchs) == {"name", "status", "detail", "remedy", "required"}
    assert (torchs["status"], torchs["required"]) == ("ok", True)


@pytest.mark.parametrize(
    ("statement", "status", "detail", "remedy"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\")",
            "missing",
            "not installed",
            "pip install 'torch>=2.6'",
        ),
        (
            "raise OSError('libcudart.so.13: cannot open shared object file')",
            "broken",
            "OSError: libcudart.so.13: cannot open shared object file",
            "pip install --force-reinstall 'torch>=2.6'",
        ),
        ("raise RuntimeError('numpy\\nABI')", "broken", "RuntimeError: numpy ABI", "reinstall"),
        ("x = 1", "broken", "what is imported as torch is not PyTorch", "reinstall"),
    ],
    ids=["absent", "library", "error", "shadowed"],
)
def test_a_torch_that_cannot_be_imported_is_reported_and_not_a_crash(
    doctor: Doctor, statement: str, status: str, detail: str, remedy: str
) -> None:
    done = doctor("--json", broken={"torch": statement})
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    found = parts(done)
    assert found["torch"]["status"] == status
    assert detail in found["torch"]["detail"]
    assert remedy in found["torch"]["remedy"]
    assert found["NVRTC"]["status"] == "ok", "what needs no torch is still checked"
    assert found["operators on the GPU"]["detail"] == "needs torch"
    faults = [name for name, check in found.items() if check["status"] == "broken"]
    assert set(faults) <= {"torch"}, "one cause is one broken part"


def test_a_broken_required_part_is_named_on_stderr(doctor: Doctor) -> None:
    done = doctor(broken={"torch": "raise ImportError('undefined symbol: iJIT_NotifyEvent')"})
    assert done.returncode == 1
    assert done.stderr == "hfai is not ready: torch\n"
    assert "undefined symbol: iJIT_NotifyEvent" in done.stdout
    assert "→ pip install --force-reinstall 'torch>=2.6'" in done.stdout


def test_a_broken_optional_part_leaves_hfai_ready(doctor: Doctor) -> None:
    done = doctor("--json", broken={"matplotlib": "raise ImportError('freetype')"})
    assert done.returncode == 0, done.stderr
    plots = parts(done)["demo's plots"]
    assert (plots["status"], plots["detail"]) == ("broken", "ImportError: freetype")
    assert plots["remedy"] == "pip install 'hfai[demo]'"


def test_the_cache_directory_of_the_environment_is_checked(doctor: Doctor, tmp_path: Path) -> None:
    blocked = tmp_path / "blocked"
    blocked.write_text("a file where a directory is due")
    done = doctor("--json", HFAI_CACHE_DIR=str(blocked))
    assert done.returncode == 0, done.stderr
    cache = parts(done)["kernel cache"]
    assert cache["status"] == "broken"
    assert str(blocked) in cache["detail"]


def test_an_unknown_option_is_refused_with_status_2(doctor: Doctor) -> None:
    done = doctor("--jsn")
    assert done.returncode == 2
    assert "No such option: --jsn" in done.stderr or "No such option '--jsn'" in done.stderr
