"""C++ parts compiled on first use: real compilers, real processes."""

from __future__ import annotations

import os
import shlex
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hfai.kernels import compiler, extension
from hfai.kernels.extension import Extension

pytestmark = pytest.mark.skipif(
    compiler.find_compiler() is None, reason="needs a C++ compiler, and none was found"
)

REAL = shlex.join(compiler.find_compiler() or [])

SOURCE = """
#include <Python.h>
static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "answer", "", -1, nullptr};
PyMODINIT_FUNC PyInit_answer() {
  PyObject *module = PyModule_Create(&definition);
  PyModule_AddIntConstant(module, "value", 42);
  return module;
}
"""

# What a user's process does: ask, wait at most so many seconds, say what came of it.
ASK = """
import sys
from hfai.kernels.extension import Extension
extension = Extension(sys.argv[1], "answer")
module = extension.wait()
print(module.value if module else extension.reason)
"""
# One that ends as soon as the compiler is at work.
ASK_AND_GO = """
import os, sys, time
from hfai.kernels.extension import Extension
Extension(sys.argv[1], "answer").request(print)
while not os.path.getsize(sys.argv[2]):
    time.sleep(0.01)
"""
# One that forks while the compiler is at work, and stays, as does its child.
ASK_AND_FORK = """
import os, sys, time
from hfai.kernels.extension import Extension
Extension(sys.argv[1], "answer").request(print)
while not os.path.getsize(sys.argv[2]):
    time.sleep(0.01)
os.fork()
time.sleep(100)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("HFAI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HFAI_EXTENSIONS", raising=False)
    compiler.version_of.cache_clear()
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> str:
    path = tmp_path / "answer.cpp"
    path.write_text(SOURCE)
    return str(path)


@pytest.fixture
def compilations(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that counts its runs in a file and takes its time; returns that file."""
    counter, wrapper = tmp_path / "runs", tmp_path / "c++"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] || {{ echo run >> {counter}; sleep ${{PAUSE:-1}}; }}\n'
        f'exec {REAL} "$@"\n'
    )
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("CXX", str(wrapper))
    counter.touch()
    return counter


def _ask(source: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", ASK, source]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _ask_and_go(source: str, compilations: Path) -> None:
    command = [sys.executable, "-c", ASK_AND_GO, source, str(compilations)]
    done = subprocess.run(command, timeout=60, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def _runs(compilations: Path) -> int:
    return len(compilations.read_text().splitlines())


def _until(condition: object, seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_a_source_becomes_a_module_and_is_kept(source: str, compilations: Path) -> None:
    for _ in range(2):
        module = Extension(source, "answer").wait()
        assert module is not None
        assert module.value == 42
    assert _runs(compilations) == 1


def test_a_changed_source_is_compiled_again(source: str, compilations: Path) -> None:
    assert Extension(source, "answer").wait() is not None
    Path(source).write_text(SOURCE.replace("42", "43"))
    module = Extension(source, "answer").wait()
    assert module is not None
    assert module.value == 43
    assert _runs(compilations) == 2


def test_who_asks_goes_on_and_is_told_later(source: str, compilations: Path) -> None:
    told: list[int] = []
    asked = Extension(source, "answer")
    began = time.monotonic()
    asked.request(lambda module: told.append(module.value))
    asked.request(lambda module: told.append(-module.value))
    assert time.monotonic() - began < 0.9, "the compiler alone takes a second"
    assert told == []
    assert asked.wait() is not None
    assert told == [42, -42]
    asked.request(lambda module: told.append(0))
    assert told == [42, -42, 0]


def test_processes_that_ask_at_once_compile_once(source: str, compilations: Path) -> None:
    processes = [_ask(source) for _ in range(3)]
    answers = [process.communicate(timeout=120)[0].strip() for process in processes]
    assert answers == ["42"] * 3
    assert _runs(compilations) == 1


def test_a_process_that_ends_early_leaves_the_binary_behind(
    source: str, compilations: Path, cache: Path
) -> None:
    _ask_and_go(source, compilations)
    _until(lambda: list(cache.rglob("answer*.so")))
    assert _ask(source).communicate(timeout=60)[0].strip() == "42"
    assert _runs(compilations) == 1


def test_a_killed_compiler_leaves_nothing_that_looks_whole_and_is_tried_again(
    source: str, compilations: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAUSE", "60")
    _ask_and_go(source, compilations)
    monkeypatch.delenv("PAUSE")
    sessions = subprocess.run(
        ["pgrep", "-f", str(Path(source).parent / "c++")], capture_output=True, text=True
    )
    for pid in map(int, sessions.stdout.split()):
        try:
            os.killpg(os.getpgid(pid), signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue
    assert not list(cache.rglob("answer*.so"))
    assert _ask(source).communicate(timeout=60)[0].strip() == "42"


def test_a_source_that_does_not_compile_says_why_once(source: str, compilations: Path) -> None:
    Path(source).write_text("int main() { return undeclared; }\n")
    asked = Extension(source, "answer")
    assert asked.wait() is None
    assert asked.reason is not None
    assert "undeclared" in asked.reason
    again = Extension(source, "answer")
    assert again.wait() is None
    assert again.reason == asked.reason
    assert _runs(compilations) == 1, "what failed would fail again"


def test_without_a_compiler_it_says_what_to_install(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    asked = Extension(source, "answer")
    assert asked.wait() is None
    assert asked.reason is not None
    assert "set CXX" in asked.reason


def test_it_can_be_switched_off(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAI_EXTENSIONS", "0")
    asked = Extension(source, "answer")
    assert asked.wait() is None
    assert asked.reason == extension.DISABLED


def test_a_binary_that_cannot_be_loaded_is_made_once_more(
    source: str, cache: Path, compilations: Path
) -> None:
    assert _ask(source).communicate(timeout=60)[0].strip() == "42"
    (binary,) = cache.rglob("answer*.so")
    binary.write_bytes(b"no library")
    assert _ask(source).communicate(timeout=60)[0].strip() == "42"
    assert _runs(compilations) == 2


def test_a_compiler_killed_for_memory_is_asked_again(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "short of memory"
    wrapper.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo old && exit\n'
        "echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1\n"
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", shlex.quote(str(wrapper)))
    asked = Extension(source, "answer")
    assert asked.wait() is None
    assert "Killed" in str(asked.reason)
    wrapper.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo old && exit\nexec {REAL} "$@"\n')
    assert Extension(source, "answer").wait() is not None


def test_a_compiler_may_be_several_words(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env {REAL} -DUNUSED")
    assert Extension(source, "answer").wait() is not None


def test_a_process_forked_meanwhile_does_not_keep_others_waiting(
    source: str, compilations: Path
) -> None:
    forking = subprocess.Popen(
        [sys.executable, "-c", ASK_AND_FORK, source, str(compilations)],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _until(lambda: _runs(compilations) == 1)
        assert _ask(source).communicate(timeout=60)[0].strip() == "42"
        assert forking.poll() is None, "its child still has the lock's file open"
    finally:
        os.killpg(forking.pid, signal.SIGKILL)
        forking.wait(60)


def test_what_a_compiler_calls_itself_need_not_be_text(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrapper = tmp_path / "c++"
    wrapper.write_text(
        f'#!/bin/sh\n[ "$1" = --version ] && printf "\\377\\376" && exit\nexec {REAL} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    assert Extension(source, "answer").wait() is not None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_cache_that_cannot_be_written_is_a_reason(source: str, cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    asked = Extension(source, "answer")
    assert asked.wait() is None
    assert asked.reason is not None
    assert "ermission" in asked.reason
