"""All checks, in the order in which they are shown: what later ones build on comes first."""

from __future__ import annotations

from collections.abc import Callable

from hfai.doctor.check import Check
from hfai.doctor.gpu import cuda_runtime, driver, gpus, torch_itself
from hfai.doctor.kernels import autograd_node, cuda_core, kernel_cache, native_launcher, nvrtc
from hfai.doctor.operators import operators_on_gpu
from hfai.doctor.parts import benchmark_peers, demo_plots
from hfai.doctor.recurrent import recurrent_kernels
from hfai.doctor.system import compiler, packages, python

CHECKS: tuple[Callable[[], Check], ...] = (
    python,
    packages,
    torch_itself,
    driver,
    cuda_runtime,
    gpus,
    compiler,
    cuda_core,
    nvrtc,
    native_launcher,
    kernel_cache,
    autograd_node,
    operators_on_gpu,
    recurrent_kernels,
    demo_plots,
    benchmark_peers,
)
