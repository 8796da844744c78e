"""Whether a call may leave torch's own path at all.

A kernel launched by hand is invisible to everything that works by watching torch's operators:
modes, tracers, functorch's transforms, tensor subclasses. Where one of them is at work the call is
theirs.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._device import DeviceContext


def why_not_plain(tensor: Tensor) -> str | None:
    """Return why torch must handle a call on `tensor` itself, or None for plain eager CUDA work.

    Costs about a microsecond; the reasons are for `hfai.explain` and for tests.
    """
    if type(tensor) is not Tensor and type(tensor) is not Parameter:
        return f"the input is a {type(tensor).__name__}, a tensor subclass"
    if not tensor.is_cuda:
        return f"the input is on {tensor.device.type}, and the kernels are for CUDA"
    if torch._C._are_functorch_transforms_active():
        return "a functorch transform (vmap, grad, jvp) is active"
    if torch._C._len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    if torch._C._len_torch_function_stack() and _foreign_function_mode():
        return "a TorchFunctionMode is active"
    if torch.autograd.forward_ad._current_level >= 0:
        return "forward-mode automatic differentiation is active"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit.trace is recording"
    return None


def _foreign_function_mode() -> bool:
    """Return whether any mode but torch.set_default_device's own is on the stack."""
    return any(
        type(torch._C._get_function_stack_at(level)) is not DeviceContext
        for level in range(torch._C._len_torch_function_stack())
    )
