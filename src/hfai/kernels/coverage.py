"""Whether a call may leave torch's own path at all.

A kernel launched by hand is invisible to everything that works by watching torch's operators:
modes, tracers, functorch's transforms, tensor subclasses. Where one of them is at work the call is
theirs. These checks stand in every eager call, so they are few and bound to local names: together
they cost under a microsecond.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C import (
    _are_functorch_transforms_active,
    _get_tracing_state,
    _len_torch_dispatch_stack,
    _len_torch_function_stack,
)
from torch.autograd import forward_ad
from torch.nn import Parameter
from torch.utils._device import DeviceContext

PLAIN_TYPES = (Tensor, Parameter)


def why_watched() -> str | None:
    """Return what is watching torch's operators now, or None where nothing is."""
    if _are_functorch_transforms_active():
        return "a functorch transform (vmap, grad, jvp) is active"
    if _len_torch_dispatch_stack():
        return "a TorchDispatchMode is active"
    if _len_torch_function_stack() and _foreign_function_mode():
        return "a TorchFunctionMode is active"
    if forward_ad._current_level >= 0:
        return "forward-mode automatic differentiation is active"
    return None if _get_tracing_state() is None else "torch.jit.trace is recording"


def why_not_plain(tensor: Tensor) -> str | None:
    """Return why `tensor` itself is no matter for a CUDA kernel, or None where it is."""
    if type(tensor) not in PLAIN_TYPES:
        return f"a {type(tensor).__name__} is a tensor subclass"
    if not tensor.is_cuda:
        return f"the tensor is on {tensor.device.type}, and the kernels are for CUDA"
    if tensor.is_nested or tensor.layout is not torch.strided:
        return "the tensor is nested or sparse"
    if not torch._C._has_storage(tensor):
        # The gradients of `is_grads_batched=True`, and whatever else torch wraps in the same type.
        return "the tensor stands for others and has no memory of its own"
    return None


def dense(tensor: Tensor) -> Tensor:
    """Return the values as a kernel reads them: row by row, and no sign kept aside as a bit."""
    if tensor.is_neg():
        tensor = tensor.resolve_neg()
    if tensor._is_zerotensor():  # zeros that torch has not given any memory
        tensor = tensor.clone()
    return tensor if tensor.is_contiguous() else tensor.contiguous()


def is_dense(tensor: Tensor) -> bool:
    """Return whether `dense` would return the tensor itself."""
    return tensor.is_contiguous() and not tensor.is_neg() and not tensor._is_zerotensor()


def _foreign_function_mode() -> bool:
    """Return whether any mode but torch.set_default_device's own is on the stack."""
    return any(
        type(torch._C._get_function_stack_at(level)) is not DeviceContext
        for level in range(_len_torch_function_stack())
    )
