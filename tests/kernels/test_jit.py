from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hfai.kernels import jit

pytest.importorskip("cuda.core", reason="needs cuda-core and NVRTC, which are for Linux")

PROGRAM = 'extern "C" __global__ void hfai_test(float* out) { out[threadIdx.x] = %d.0f; }'


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own."""
    monkeypatch.setenv("HFAI_CACHE_DIR", str(tmp_path / "cache"))
    jit._disk_cache.cache_clear()
    yield tmp_path / "cache"
    jit._disk_cache.cache_clear()


def _files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def _compile(number: int) -> bytes:
    return bytes(jit.compile_to_cubin(PROGRAM % number, "sm_90").code)


def test_a_binary_is_kept_on_disk_and_taken_from_there(cache: Path) -> None:
    first = _compile(1)
    assert len(_files(cache)) == 1
    assert _compile(1) == first
    assert len(_files(cache)) == 1
    assert _compile(2) != first
    assert len(_files(cache)) == 2
    jit.compile_to_cubin(PROGRAM % 1, "sm_80")
    assert len(_files(cache)) == 3, "another architecture, another binary"


def test_processes_that_compile_at_once_leave_whole_binaries(cache: Path) -> None:
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        binaries = pool.map(_compile, [1, 2, 1, 2, 1, 2])
    assert binaries[::2] == [binaries[0]] * 3
    kept = {path.read_bytes() for path in _files(cache)}
    assert kept == set(binaries)


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes anywhere")
def test_a_cache_that_cannot_be_written_costs_only_the_cache(cache: Path) -> None:
    cache.mkdir()
    cache.chmod(0o500)
    assert _compile(1)


def test_a_cache_path_that_is_a_file_costs_only_the_cache(cache: Path) -> None:
    cache.write_text("in the way")
    assert _compile(1)
    assert cache.read_text() == "in the way"


def test_the_cache_directory_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFAI_CACHE_DIR", "/a/b")
    assert jit.cache_directory() == Path("/a/b")
    monkeypatch.delenv("HFAI_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/c")
    assert jit.cache_directory() == Path("/c/hfai")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert jit.cache_directory() == Path.home() / ".cache" / "hfai"


def test_a_source_that_does_not_compile_shows_the_compilers_words() -> None:
    with pytest.raises(Exception, match='identifier "nonsense" is undefined'):
        jit.compile_to_cubin('extern "C" __global__ void hfai_test() { nonsense; }', "sm_90")


def test_errors_name_the_operators_file_and_line() -> None:
    text = jit.program_text(["layer_norm/column_sums.cu"], {}, {"W": torch.float32})
    with pytest.raises(Exception, match=r"layer_norm/column_sums\.cu\(\d+\): error"):
        jit.compile_to_cubin(text, "sm_90")  # THREADS is missing


def test_without_cuda_core_the_reason_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['cuda'] = None\n"
        "from hfai.kernels import jit\n"
        "print(jit.why_unavailable())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert "pip install 'hfai[cuda]'" in done.stdout
