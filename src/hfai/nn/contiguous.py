"""`contiguous_param`: a model's parameters side by side in one buffer for each dtype and device.

One buffer makes one collective, one copy or one optimizer kernel out of hundreds. The Parameter
objects keep their identity; only their storage moves. A marker on the model remembers that this was
our doing, so that `to_torch` gives storage back to these models and to no others.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import nn

# Views start on 256-byte boundaries, as torch's own allocations do: kernels use 16-byte accesses.
ALIGNMENT_BYTES = 256
MARKER = "_hfai_contiguous_param"


def pack(model: nn.Module) -> None:
    """Move all parameters of `model` into one buffer for each dtype and device, in place.

    Raises:
        ValueError: two names hold one parameter or overlapping memory (EMA copies and tied weights
            would silently come apart), or a parameter is no plain dense tensor.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    owner_of_storage: dict[tuple[torch.device, int], str] = {}
    if model.__dict__.get(MARKER, False):
        return
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if type(parameter.data) is not torch.Tensor or parameter.layout != torch.strided:
            raise ValueError(
                f"contiguous_param=True needs plain dense parameters, but {name!r} is a "
                f"{type(parameter.data).__name__} with layout {parameter.layout}: "
                f"pass contiguous_param=False"
            )
        if parameter.is_meta:
            raise ValueError(
                f"contiguous_param=True needs parameters with storage, but {name!r} is on the "
                f"meta device: materialise the model first, or pass contiguous_param=False"
            )
        if parameter.numel():
            storage = (parameter.device, parameter.untyped_storage().data_ptr())
            other = owner_of_storage.setdefault(storage, name)
            if other != name:
                raise ValueError(
                    f"contiguous_param=True needs parameters that are not shared, but {name!r} and "
                    f"{other!r} use the same memory: pass contiguous_param=False"
                )
        groups[parameter.dtype, parameter.device].append(parameter)
    for (dtype, device), parameters in groups.items():
        _move_into_one_buffer(parameters, dtype, device)
    model.__dict__[MARKER] = True


def unpack(model: nn.Module) -> None:
    """Give every parameter storage of its own again, if `pack` took it away."""
    for module in model.modules():
        if module.__dict__.pop(MARKER, False):
            for parameter in module.parameters():
                parameter.data = parameter.data.clone()


def _move_into_one_buffer(
    parameters: list[nn.Parameter], dtype: torch.dtype, device: torch.device
) -> None:
    alignment = ALIGNMENT_BYTES // dtype.itemsize
    padded = [-(-p.numel() // alignment) * alignment for p in parameters]
    buffer = torch.zeros(sum(padded), dtype=dtype, device=device)
    start = 0
    for parameter, length in zip(parameters, padded, strict=True):
        view = buffer[start : start + parameter.numel()].view(parameter.shape)
        view.copy_(parameter.data)
        parameter.data = view
        start += length
