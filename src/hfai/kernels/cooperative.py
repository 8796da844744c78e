"""Cooperative launches: kernels whose blocks wait for each other must all run at once.

The driver refuses a cooperative launch whose blocks the device cannot hold together, which is what
keeps such a kernel from waiting forever for a block that has no room. These kernels run for
hundreds of microseconds, so the launch goes through cuda-bindings.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from typing import Any

import torch

from hfai.kernels import jit


class RefusedError(RuntimeError):
    """The device has no room for all blocks of a launch at once."""


def load(text: str, name: str, device: int, *, block: int, shared_bytes: int = 0) -> jit.Kernel:
    """Load a kernel as `jit.load` does, to be launched cooperatively.

    Args:
        text: the program.
        name: of the kernel in it.
        device: index of the device.
        block: threads in a block.
        shared_bytes: dynamic shared memory of a block.

    Returns:
        The kernel. `launch` raises RefusedError where the blocks asked for cannot all run at once.

    Raises:
        RuntimeError: the driver refuses the binary or the shared memory asked for.
    """
    from cuda.bindings import driver

    kernel = jit.load(text, name, device, block=block, shared_bytes=shared_bytes)
    with torch.cuda.device(device):
        error, function = driver.cuKernelGetFunction(kernel.owner.handle)
    if error:
        raise RuntimeError(f"{name} could not be loaded onto device {device}: {error}")
    launch = functools.partial(_launch, function, device, block, shared_bytes)
    return dataclasses.replace(kernel, launch=launch)


def _launch(
    function: Any,
    device: int,
    block: int,
    shared_bytes: int,
    grid: int,
    stream: int,
    *arguments: int,
) -> None:
    from cuda.bindings import driver

    torch.cuda.current_stream(device)  # autograd's threads have no context before that
    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    attribute.value.cooperative = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = grid, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = block, 1, 1
    config.sharedMemBytes, config.hStream = shared_bytes, stream
    config.attrs, config.numAttrs = [attribute], 1
    types = (ctypes.c_uint64,) * len(arguments)
    (error,) = driver.cuLaunchKernelEx(config, function, (arguments, types), 0)
    if error == driver.CUresult.CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE:
        raise RefusedError(f"the device has no room for {grid} blocks of {block} threads at once")
    if error:
        raise RuntimeError(f"cooperative launch of {grid} blocks failed: {error}")
