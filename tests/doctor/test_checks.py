"""The checks themselves: what they promise about their answers, and what a raising one becomes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hfai.doctor import CHECKS, Check, all_ready, diagnose
from hfai.doctor.kernels import kernel_cache, nvrtc
from hfai.doctor.operators import operators_on_gpu
from hfai.doctor.system import compiler
from hfai.kernels import jit


def test_every_part_is_named_once_and_what_is_broken_says_how_to_mend_it() -> None:
    checks = list(diagnose(CHECKS))
    assert len({check.name for check in checks}) == len(CHECKS)
    for check in checks:
        assert check.detail, check
        assert "\n" not in check.detail + check.remedy, check
        assert check.remedy or check.status != "broken", check


def test_a_check_that_raises_is_a_broken_part_and_the_next_ones_still_run() -> None:
    def falling_over() -> Check:
        raise OSError("libsomething.so: cannot open\nshared object file")

    def standing() -> Check:
        return Check("standing", "ok", "upright")

    errors: list[Exception] = []
    broken, fine = diagnose([falling_over, standing], errors.append)
    assert (broken.name, broken.status) == ("falling over", "broken")
    assert broken.detail == "OSError: libsomething.so: cannot open shared object file"
    assert broken.remedy
    assert fine.status == "ok"
    assert isinstance(errors[0], OSError)


def test_only_required_parts_decide_whether_hfai_is_ready() -> None:
    missing_plots = Check("plots", "missing", "no matplotlib", "install it")
    assert all_ready([missing_plots, Check("torch", "ok", "2.11", required=True)])
    assert not all_ready([Check("torch", "missing", "not installed", "install", required=True)])


def test_nvrtc_really_compiles_without_a_gpu() -> None:
    check = nvrtc()
    assert check.status == "ok", check
    assert "compiled a kernel for sm_" in check.detail


def test_the_cache_that_is_checked_is_the_one_that_kernels_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HFAI_CACHE_DIR", str(tmp_path / "cache"))
    assert kernel_cache().detail == f"{jit.cache_directory()} (HFAI_CACHE_DIR), made on first use"
    jit._disk_cache.cache_clear()
    jit.compile_to_cubin('extern "C" __global__ void nothing() {}', "sm_90")
    jit._disk_cache.cache_clear()
    check = kernel_cache()
    assert check.status == "ok"
    assert "MiB" in check.detail
    assert ", 0 files" not in check.detail


def test_the_cache_defaults_to_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HFAI_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kernel_cache().detail == f"{tmp_path / 'hfai'}, made on first use"


def test_a_cache_that_cannot_be_written_is_broken_but_not_required(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("HFAI_CACHE_DIR", str(tmp_path / "file" / "cache"))
    check = kernel_cache()
    assert (check.status, check.required) == ("broken", False)
    assert f"{tmp_path / 'file' / 'cache'} (HFAI_CACHE_DIR) cannot be written" in check.detail
    assert "HFAI_CACHE_DIR" in check.remedy


def test_a_compiler_that_cxx_names_wrongly_is_broken_and_none_at_all_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert compiler().status == "broken"
    assert "CXX names no-such-compiler" in compiler().detail
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert compiler().status == "missing"
    false = tmp_path / "c++"
    false.write_text("#!/bin/sh\nexit 1\n")
    false.chmod(0o755)
    assert compiler().detail == f"{false} does not run"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what is missing without a GPU")
def test_without_a_gpu_its_operators_are_missing_and_not_required() -> None:
    check = operators_on_gpu()
    assert (check.status, check.detail, check.required) == ("missing", "needs an NVIDIA GPU", False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="launches kernels: needs an NVIDIA GPU")
def test_on_a_gpu_our_operators_run_and_agree_with_torch() -> None:
    check = operators_on_gpu()
    assert check.status == "ok", check
    assert "LayerNorm" in check.detail
    assert "RMSNorm" in check.detail
