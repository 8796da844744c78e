"""torch, the NVIDIA driver, and the GPUs that torch can use."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import warnings
from types import ModuleType

from hfai.doctor.check import Check, one_line

OLDEST_TORCH = (2, 6)


@functools.cache
def import_torch() -> ModuleType | str:
    """Return torch, or in one line why it cannot be imported; tried once."""
    try:
        import torch
    except Exception as error:  # ImportError, OSError of a missing library, or worse
        return one_line(error)
    if not hasattr(torch, "nn") or not hasattr(torch, "__version__"):
        return "what is imported as torch is not PyTorch (a folder or file named torch?)"
    return torch


def torch_itself() -> Check:
    """Check that torch can be imported and is new enough."""
    torch = import_torch()
    if isinstance(torch, str):
        if torch.startswith("ModuleNotFoundError: No module named 'torch'"):
            remedy = "pip install 'torch>=2.6'"
            return Check("torch", "missing", "not installed", remedy, required=True)
        remedy = "pip install --force-reinstall 'torch>=2.6'"
        return Check("torch", "broken", torch, remedy, required=True)
    version = str(torch.__version__)
    cuda = f"built for CUDA {torch.version.cuda}" if torch.version.cuda else "built for the CPU"
    detail = f"{version}, {cuda}, {torch.get_num_threads()} CPU threads"
    major, minor = (int(part) for part in version.split(".")[:2])
    if (major, minor) < OLDEST_TORCH:
        remedy = "pip install --upgrade 'torch>=2.6'"
        return Check("torch", "broken", detail, remedy, required=True)
    return Check("torch", "ok", detail, required=True)


@functools.cache
def driver_cuda() -> tuple[int, int] | None:
    """Return the newest CUDA version that the NVIDIA driver can run, or None without a driver."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return version.value // 1000, version.value % 1000 // 10


@functools.cache
def gpus_of_driver() -> list[tuple[str, str]]:
    """Return name and driver version of each GPU that nvidia-smi lists."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    pairs = (line.rsplit(", ", 1) for line in done.stdout.strip().splitlines())
    return [(pair[0], pair[1]) for pair in pairs if len(pair) == 2]


def driver() -> Check:
    """Look for the NVIDIA driver."""
    supports = driver_cuda()
    listed = gpus_of_driver()
    if supports is None:
        if listed:
            remedy = "make libcuda.so.1 visible: in a container, use NVIDIA's container runtime"
            detail = "nvidia-smi lists GPUs, but libcuda.so.1 cannot be loaded"
            return Check("NVIDIA driver", "broken", detail, remedy, required=True)
        return Check("NVIDIA driver", "missing", "none: hfai runs torch's own code on the CPU")
    version = f"{listed[0][1]}, " if listed else ""
    return Check("NVIDIA driver", "ok", f"{version}up to CUDA {supports[0]}.{supports[1]}")


def cuda_runtime() -> Check:
    """Compare the CUDA that torch was built for with what the driver can run."""
    torch = import_torch()
    if isinstance(torch, str):
        return Check("CUDA runtime", "missing", "needs torch", "mend torch first")
    supports = driver_cuda()
    built_for = torch.version.cuda
    if built_for is None:
        if gpus_of_driver():
            detail = "torch is a CPU build, but this machine has an NVIDIA GPU"
            return Check("CUDA runtime", "missing", detail, "install a CUDA build of torch")
        return Check("CUDA runtime", "missing", "torch is a CPU build")
    if supports is None:
        detail = f"torch is built for CUDA {built_for}, and there is no driver: it runs on the CPU"
        return Check("CUDA runtime", "missing", detail)
    if supports[0] < int(built_for.split(".")[0]):
        detail = (
            f"torch is built for CUDA {built_for}, the driver runs up to "
            f"{supports[0]}.{supports[1]}"
        )
        remedy = f"update the driver, or install a torch built for CUDA {supports[0]}"
        return Check("CUDA runtime", "broken", detail, remedy, required=True)
    return Check("CUDA runtime", "ok", f"CUDA {built_for}")


@functools.cache
def usable_gpus() -> list[tuple[str, int, int, int]] | str:
    """Return name, capability and memory of each GPU that torch can use, or why it cannot."""
    torch = import_torch()
    if isinstance(torch, str):
        return "needs torch"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        available = torch.cuda.is_available()
    if not available:
        if torch.version.cuda is None:
            return "torch is a CPU build"
        return " ".join(str(caught[0].message).split()) if caught else "torch sees no GPU"
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append((properties.name, properties.major, properties.minor, properties.total_memory))
    return found


def gpus() -> Check:
    """List the GPUs that torch can use."""
    found = usable_gpus()
    if not isinstance(found, str):
        shown = "; ".join(
            f"{name}, compute capability {major}.{minor}, {memory / 2**30:.0f} GiB"
            for name, major, minor, memory in found
        )
        return Check("GPUs", "ok", shown)
    if found in ("needs torch", "torch is a CPU build") or not gpus_of_driver():
        return Check("GPUs", "missing", f"{found}: hfai runs torch's own code on the CPU")
    names = ", ".join(name for name, _ in gpus_of_driver())
    remedy = "see that CUDA_VISIBLE_DEVICES names a GPU and that the driver fits torch's CUDA"
    return Check("GPUs", "broken", f"{names} present, but {found}", remedy, required=True)
