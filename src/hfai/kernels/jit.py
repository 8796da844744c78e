"""Compile CUDA C++ on first use, keep the binaries on disk, load and launch them.

Sources are shipped with the package. A program is one operator's source behind `common.cuh` and a
list of compile-time constants; NVRTC turns it into machine code for the device at hand in a tenth
of a second. NVIDIA's cuda-core compiles, caches (by source, options, compiler version and
architecture; temporary file, then rename) and loads; the launch goes through `_launch`, a few lines
of C++, because on a small tensor the launch is what a user waits for.

Nothing here runs at import: cuda-core is imported, and a device touched, when a kernel is needed.
"""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from cuda.core import ObjectCode

KERNELS = Path(__file__).parent
CACHE_BYTES = 512 * 2**20  # the least recently used binaries are dropped beyond this

OLDEST_CAPABILITY = (8, 0)  # cp.async, bf16 conversions

PORTABLE_CLUSTER = 8  # blocks, on every device that has clusters; more must be asked for

CUDA_TYPES = {
    torch.float32: "float",
    torch.float16: "Float16",
    torch.bfloat16: "BFloat16",
}


@dataclass(frozen=True)
class DeviceLimits:
    """What a plan needs to know of a device."""

    architecture: str
    multiprocessors: int
    shared_bytes_per_block: int
    max_cluster: int
    """The largest portable number of blocks in a cluster; 1 where there are no clusters."""


@functools.cache
def device_limits(device: int) -> DeviceLimits:
    """Read a device's limits from the driver."""
    from cuda.core import Device

    handle = Device(device)
    major, minor = handle.compute_capability
    return DeviceLimits(
        architecture=f"sm_{major}{minor}",
        multiprocessors=handle.properties.multiprocessor_count,
        shared_bytes_per_block=handle.properties.max_shared_memory_per_block_optin,
        max_cluster=PORTABLE_CLUSTER if major >= 9 else 1,
    )


def cache_directory() -> Path:
    """Return where compiled kernels are kept: `$HFAI_CACHE_DIR`, else the user's own cache."""
    chosen = os.environ.get("HFAI_CACHE_DIR")
    if chosen:
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "hfai"


def program_text(
    sources: Sequence[str], constants: Mapping[str, int | bool], types: Mapping[str, torch.dtype]
) -> str:
    """Put `common.cuh`, the constants and the number types in front of an operator's sources.

    Args:
        sources: paths of `.cuh` and `.cu` files, relative to this package's directory, in order.
        constants: compile-time integers and booleans by name.
        types: element types by name; each is one of `CUDA_TYPES`.
    """
    lines = [
        f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {str(value).lower()};"
        for name, value in constants.items()
    ]
    lines += [f"typedef {CUDA_TYPES[dtype]} {name};" for name, dtype in types.items()]
    parts = [(KERNELS / "common.cuh").read_text(), *lines]
    for source in sources:
        parts += [f'#line 1 "{source}"', (KERNELS / source).read_text()]
    return "\n".join(parts)


def compile_to_cubin(
    text: str, architecture: str, *, cache: bool = True, log: Any = None
) -> ObjectCode:
    """Compile a program to machine code; needs NVRTC but no GPU.

    Args:
        text: what `program_text` returns.
        architecture: such as `sm_90`.
        cache: look the binary up on disk first and keep it there.
        log: an object with `write` that gets the compiler's and assembler's messages.

    Raises:
        Exception: cuda-core's, with NVRTC's log, where the source does not compile.
    """
    from cuda.core import Program, ProgramOptions

    options = ProgramOptions(
        name="hfai", arch=architecture, std="c++17", ptxas_options=["-v"] if log else None
    )
    program = Program(text, "c++", options=options)
    disk = _disk_cache() if cache else None
    if disk is not None:
        try:
            return program.compile("cubin", cache=disk)
        except OSError:  # a full or read-only disk costs the cache, not the kernel
            pass
    return program.compile("cubin", logs=log)


@functools.cache
def _disk_cache() -> Any:
    from cuda.core.utils import FileStreamProgramCache

    try:
        return FileStreamProgramCache(cache_directory() / "kernels", max_size_bytes=CACHE_BYTES)
    except (OSError, RuntimeError):  # RuntimeError: a user without a home directory
        return None


@dataclass(frozen=True)
class Kernel:
    """A loaded kernel.

    `launch(grid, stream, *arguments)` enqueues `grid` blocks in all on a raw stream of the kernel's
    device. Each int becomes an 8-byte parameter (a pointer or `i64`), each float a 4-byte one. It
    raises RuntimeError with the driver's words where the driver refuses. A partial object and no
    method: that saves a Python frame in every call.
    """

    launch: Callable[..., None]
    cluster: int
    resident_blocks: int
    """Blocks that the whole device runs at once."""
    description: tuple[int, ...]
    """function, device, block, shared_bytes, cluster, overlap: `Kernel` in native/driver.hpp."""
    owner: Any
    """cuda-core's kernel, which keeps the loaded binary alive."""


def load(
    text: str,
    name: str,
    device: int,
    *,
    block: int,
    shared_bytes: int = 0,
    cluster: int = 1,
    overlap: bool = False,
    architecture: str | None = None,
) -> Kernel:
    """Compile if need be, load onto `device` (an index) and fix the launch shape of one kernel.

    Args:
        text: the program.
        name: of the kernel in it.
        device: index of the device.
        block: threads in a block.
        shared_bytes: dynamic shared memory of a block.
        cluster: blocks in a cluster.
        overlap: let the kernel start before the one in front of it in the stream has ended, on
            devices that can (`wait_for_previous_kernel` in common.cuh).
        architecture: to compile for, by default the device's own: `sm_90a` where the program uses
            what only Hopper has.

    Raises:
        RuntimeError: the driver refuses the binary or the shared memory asked for.
    """
    from cuda.bindings import driver
    from cuda.core import Device

    with torch.cuda.device(device):
        torch.cuda.current_stream()  # makes the primary context current for cuda-core
        Device(device).set_current()
        architecture = architecture or device_limits(device).architecture
        try:
            kernel = compile_to_cubin(text, architecture).get_kernel(name)
        except Exception:  # a damaged cache entry: the fresh compilation's error is the one to show
            kernel = compile_to_cubin(text, architecture, cache=False).get_kernel(name)
        if shared_bytes:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(
                attribute, shared_bytes, kernel.handle, driver.CUdevice(device)
            )
            if error:
                raise RuntimeError(
                    f"{name} asks for {shared_bytes} bytes of shared memory: {error}"
                )
        if cluster > PORTABLE_CLUSTER:
            attribute = (
                driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
            )
            (error,) = driver.cuKernelSetAttribute(
                attribute, 1, kernel.handle, driver.CUdevice(device)
            )
            if error:
                raise RuntimeError(f"{name} asks for clusters of {cluster} blocks: {error}")
        resident = _resident_blocks(kernel, device, block, shared_bytes, cluster)
        error, function = driver.cuKernelGetFunction(kernel.handle)  # launches faster than CUkernel
        if error:
            raise RuntimeError(f"{name} could not be loaded onto device {device}: {error}")
    overlap = overlap and device_limits(device).max_cluster > 1  # both came with Hopper
    description = (int(function), device, block, shared_bytes, cluster, overlap)
    return Kernel(
        functools.partial(_launch(), *description), cluster, resident, description, kernel
    )


def _resident_blocks(kernel: Any, device: int, block: int, shared_bytes: int, cluster: int) -> int:
    from cuda.core import Device, LaunchConfig

    if cluster == 1:
        blocks: int = kernel.occupancy.max_active_blocks_per_multiprocessor(block, shared_bytes)
        return blocks * device_limits(device).multiprocessors
    config = LaunchConfig(grid=1, cluster=cluster, block=block, shmem_size=shared_bytes)
    clusters: int = kernel.occupancy.max_active_clusters(
        config, stream=Device(device).default_stream
    )
    return clusters * cluster


@functools.cache
def _launch() -> Callable[..., None]:
    """Return the launch function: the native one, or cuda-bindings' where that was not built."""
    try:
        from hfai.kernels._launch import launch
    except ImportError:
        return _launch_through_bindings
    native: Callable[..., None] = launch
    return native


def _launch_through_bindings(
    handle: int,
    device: int,
    block: int,
    shared_bytes: int,
    cluster: int,
    overlap: bool,
    grid: int,
    stream: int,
    *arguments: int | float,
) -> None:
    import ctypes

    from cuda.bindings import driver

    torch.cuda.current_stream(device)
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    attributes = []
    if cluster > 1:
        attribute = driver.CUlaunchAttribute()
        attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attribute.value.clusterDim.x = cluster
        attribute.value.clusterDim.y = attribute.value.clusterDim.z = 1
        attributes.append(attribute)
    if overlap:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        attributes.append(attribute)
    if attributes:
        config.attrs, config.numAttrs = attributes, len(attributes)
    types = tuple(ctypes.c_float if isinstance(a, float) else ctypes.c_uint64 for a in arguments)
    (error,) = driver.cuLaunchKernelEx(config, driver.CUfunction(handle), (arguments, types), 0)
    if error:
        raise RuntimeError(f"kernel launch failed: {error}")


@functools.cache
def why_unavailable(device: int | None = None) -> str | None:
    """Return why kernels can't be compiled or run here, or None where they can.

    Args:
        device: index of the device to try it on, once, with an empty kernel; None asks only whether
            the packages are there.
    """
    try:
        import cuda.bindings.driver
        import cuda.core.utils  # noqa: F401
    except ImportError as error:
        return (
            f"cuda-core is not installed ({error}): pip install 'hfai[cuda]', "
            f"or 'hfai[cuda12]' where torch is built for CUDA 12"
        )
    if device is None:
        return None
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < OLDEST_CAPABILITY:
        oldest = ".".join(map(str, OLDEST_CAPABILITY))
        return f"the GPU's compute capability is {major}.{minor}, and the kernels need {oldest}"
    try:
        load('extern "C" __global__ void hfai_probe() {}', "hfai_probe", device, block=1)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        warnings.warn(
            f"hfai's kernels can't be compiled or loaded on cuda:{device}, so torch's are used "
            f"({reason[0]}); `hfai doctor` says more",
            stacklevel=2,
        )
        return f"kernels can't be compiled or loaded: {reason[0]}"
    return None
