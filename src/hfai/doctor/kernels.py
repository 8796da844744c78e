"""What hfai's CUDA kernels need: cuda-core, NVRTC, the launcher, and a place for the binaries."""

from __future__ import annotations

import importlib
import os
import tempfile
from importlib import util
from pathlib import Path

from hfai.doctor.check import Check, one_line, with_version
from hfai.doctor.gpu import import_torch, usable_gpus

PROBE = """
extern "C" __global__ void probe(float *x) {
  x[blockIdx.x * blockDim.x + threadIdx.x] *= 2.0f;
}
"""
DEFAULT_ARCHITECTURE = "sm_80"


def cuda_core() -> Check:
    """Check that NVIDIA's cuda-core, which compiles and loads kernels, can be imported."""
    if util.find_spec("cuda") is None or util.find_spec("cuda.core") is None:
        detail = "not installed: hfai runs torch's own code"
        return Check("cuda-core", "missing", detail, _install())
    try:
        importlib.import_module("cuda.core")
        importlib.import_module("cuda.bindings.driver")
    except Exception as error:
        remedy = f"install it for the CUDA that torch is built for: {_install()}"
        return Check("cuda-core", "broken", one_line(error), remedy)
    versions = [with_version(name) for name in ("cuda-core", "cuda-bindings")]
    return Check("cuda-core", "ok", ", ".join(versions))


def nvrtc() -> Check:
    """Compile three lines with NVRTC, for the GPU that is here or else for `sm_80`."""
    try:
        from cuda.core import Program, ProgramOptions
    except Exception:
        return Check("NVRTC", "missing", "needs cuda-core", _install())
    found = usable_gpus()
    architecture = DEFAULT_ARCHITECTURE
    if not isinstance(found, str) and found:
        architecture = f"sm_{found[0][1]}{found[0][2]}"
    try:
        program = Program(PROBE, "c++", options=ProgramOptions(arch=architecture))
        binary = program.compile("cubin")
    except Exception as error:
        remedy = f"install NVRTC for the CUDA that torch is built for: {_install()}"
        return Check("NVRTC", "broken", one_line(error), remedy)
    detail = f"compiled a kernel for {architecture} ({len(binary.code)} bytes)"
    try:
        from cuda.bindings import nvrtc as bindings

        _, major, minor = bindings.nvrtcVersion()
        detail = f"{major}.{minor}, {detail}"
    except Exception:  # only the version would be missing from the line
        pass
    return Check("NVRTC", "ok", detail)


def native_launcher() -> Check:
    """Look for the compiled launcher; without it a launch costs some microseconds more."""
    name = "hfai.kernels._launch"
    rebuild = "install hfai again where there is a C++ compiler (in a checkout: make test)"
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        detail = "not built: launches go through Python, some microseconds slower"
        return Check("native launcher", "missing", detail, rebuild)
    except ImportError as error:
        return Check("native launcher", "broken", one_line(error), rebuild)
    return Check("native launcher", "ok", "built")


def autograd_node() -> Check:
    """Compile the C++ autograd nodes against this torch, as a first call on a GPU would."""
    name = "C++ autograd nodes"
    found = usable_gpus()
    if isinstance(found, str) or not found:
        return Check(name, "missing", "of use with a GPU only: compiled there on first use")
    from hfai.kernels.cell.autograd import EXTENSION as CELL
    from hfai.kernels.extension import DISABLED
    from hfai.kernels.layer_norm.autograd import EXTENSION as LAYER_NORM

    failed = [extension for extension in (LAYER_NORM, CELL) if extension.wait() is None]
    if not failed:
        return Check(name, "ok", f"compiled for torch {with_version('torch').split()[-1]}")
    reason = " ".join((failed[0].reason or "the compiler did not end").split())
    detail = f"layers go through Python, some microseconds a call slower: {reason}"
    remedy = "install g++ 10 or later, or clang++, and Python's headers"
    return Check(name, "missing", detail, "unset it" if reason == DISABLED else remedy)


def kernel_cache() -> Check:
    """Check that the directory for compiled kernels can be written."""
    name = "kernel cache"
    directory = cache_directory()
    source = " (HFAI_CACHE_DIR)" if os.environ.get("HFAI_CACHE_DIR") else ""
    remedy = "set HFAI_CACHE_DIR to a directory that you may write; else kernels are compiled anew"
    existing = directory
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        fault = f"{directory}{source} cannot be written: {error.strerror}"
        return Check(name, "broken", fault, remedy)
    if not directory.exists():
        return Check(name, "ok", f"{directory}{source}, made on first use")
    sizes = [file.stat().st_size for file in directory.rglob("*") if file.is_file()]
    return Check(
        name, "ok", f"{directory}{source}, {len(sizes)} files, {sum(sizes) / 2**20:.1f} MiB"
    )


def cache_directory() -> Path:
    """Return where kernels are kept; also where torch, and with it hfai.kernels, is broken."""
    if isinstance(import_torch(), str):
        base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
        return Path(os.environ.get("HFAI_CACHE_DIR") or Path(base) / "hfai").expanduser()
    from hfai.kernels import jit

    return jit.cache_directory()


def _install() -> str:
    """Return the command that installs cuda-core for the CUDA major version of torch."""
    torch = import_torch()
    cuda = None if isinstance(torch, str) else torch.version.cuda
    extra = f" 'cuda-core[cu{cuda.split('.')[0]}]'" if cuda else ""
    return f"pip install 'hfai[cuda]'{extra}"
