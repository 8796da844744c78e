"""`contiguous_param`: a model's parameters side by side in one buffer for each dtype and device.

One buffer makes one collective, one copy or one optimizer kernel out of hundreds. The Parameter
objects keep their identity and their strides; only their storage moves. A marker on the model
remembers that this was our doing, so that `to_torch` gives storage back to these models and to no
others. The marker says nothing about the present: `model.half()` or a deep copy scatter the
parameters again, so `pack` looks at the memory itself.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hfai.nn.wrapped import is_sharded

# Views start on 256-byte boundaries, as torch's own allocations do: kernels use 16-byte accesses.
ALIGNMENT_BYTES = 256
MARKER = "_hfai_contiguous_param"


class _Place(NamedTuple):
    """Where a parameter starts in its buffer, counted in elements, and the strides it has there."""

    parameter: nn.Parameter
    offset: int
    stride: tuple[int, ...]


class _Extent(NamedTuple):
    """The bytes from the first element of a tensor to past its last, as addresses."""

    start: int
    end: int
    name: str


def pack(model: nn.Module) -> None:
    """Move all parameters of `model` into one buffer for each dtype and device, in place.

    Parameters that already lie that way stay where they are.

    Raises:
        ValueError: two names hold one parameter or overlapping memory (EMA copies and tied weights
            would silently come apart), or a parameter cannot be moved: it is sharded, not yet
            materialised, or no plain dense tensor. Nothing has been moved then.
    """
    _require_movable(model)
    _require_separate_memory(model)
    groups: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = defaultdict(list)
    for parameter in model.parameters():
        groups[parameter.dtype, parameter.device].append(parameter)
    for (dtype, device), parameters in groups.items():
        places, length = _layout(parameters)
        if not _lie_at(places, length):
            _move_to(places, torch.zeros(length, dtype=dtype, device=device))
    model.__dict__[MARKER] = True


def unpack(model: nn.Module) -> None:
    """Give every parameter storage of its own again, if `pack` took it away.

    Parameters that FSDP has taken over since are FSDP's own and stay as they are.
    """
    sharded = any(is_sharded(module) for module in model.modules())
    for module in model.modules():
        if module.__dict__.pop(MARKER, False) and not sharded:
            for parameter in module.parameters():
                if _shares_storage(parameter):
                    parameter.data = parameter.data.clone()


def _require_movable(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if is_sharded(module):
            raise ValueError(
                f"contiguous_param=True needs parameters that are whole, but "
                f"{name or 'the model'} is sharded ({type(module).__name__}): call to_hfai before "
                f"FSDP, or pass contiguous_param=False"
            )
    for name, parameter in model.named_parameters():
        if is_lazy(parameter) or parameter.is_meta:
            raise ValueError(
                f"contiguous_param=True needs parameters with storage, but {name!r} has none yet: "
                f"materialise the model first, or pass contiguous_param=False"
            )
        if type(parameter.data) is not Tensor or parameter.layout != torch.strided:
            raise ValueError(
                f"contiguous_param=True needs plain dense parameters, but {name!r} is a "
                f"{type(parameter.data).__name__} with layout {parameter.layout}: "
                f"pass contiguous_param=False"
            )


def _require_separate_memory(model: nn.Module) -> None:
    """Refuse a parameter that overlaps another parameter or a buffer of the model."""
    extents: dict[torch.device, list[_Extent]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.numel():
            extents[parameter.device].append(_extent(name, parameter))
    for on_device in extents.values():
        on_device.sort()
        for one, other in pairwise(on_device):
            if other.start < one.end:
                raise _shared(one.name, other.name)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        on_device = extents.get(buffer.device, [])
        if type(buffer) is not Tensor or buffer.layout != torch.strided or not buffer.numel():
            continue
        extent = _extent(name, buffer)
        # The last parameter that starts before the buffer ends is the only one to look at.
        before = bisect_right(on_device, extent.end - 1, key=lambda other: other.start)
        if before and on_device[before - 1].end > extent.start:
            raise _shared(on_device[before - 1].name, name)


def _shared(one: str, other: str) -> ValueError:
    return ValueError(
        f"contiguous_param=True needs parameters that are not shared, but {one!r} and {other!r} "
        f"use the same memory: pass contiguous_param=False"
    )


def _extent(name: str, tensor: Tensor) -> _Extent:
    last = sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    start = tensor.data_ptr()
    return _Extent(start, start + (last + 1) * tensor.element_size(), name)


def _layout(parameters: list[nn.Parameter]) -> tuple[list[_Place], int]:
    """Lay the parameters out one after the other; also return the length of the buffer."""
    places = []
    offset = 0
    for parameter in parameters:
        # Dense strides are kept (a channels-last weight stays so), gaps and overlaps are not.
        stride = torch.empty_like(parameter, device="meta").stride()
        places.append(_Place(parameter, offset, stride))
        alignment = ALIGNMENT_BYTES // parameter.element_size()
        offset += -(-parameter.numel() // alignment) * alignment
    return places, offset


def _lie_at(places: list[_Place], length: int) -> bool:
    storage = places[0].parameter.untyped_storage()
    if storage.nbytes() != length * places[0].parameter.element_size():
        return False
    return all(
        place.parameter.untyped_storage().data_ptr() == storage.data_ptr()
        and place.parameter.storage_offset() == place.offset
        and place.parameter.stride() == place.stride
        for place in places
    )


def _move_to(places: list[_Place], buffer: Tensor) -> None:
    for parameter, offset, stride in places:
        view = buffer.as_strided(parameter.shape, stride, offset)
        view.copy_(parameter.data)
        parameter.data = view


def _shares_storage(parameter: nn.Parameter) -> bool:
    """Whether a plain parameter lies in a storage that is larger than it needs."""
    return (
        type(parameter.data) is Tensor
        and not parameter.is_meta
        and parameter.layout == torch.strided
        and parameter.untyped_storage().nbytes() != parameter.numel() * parameter.element_size()
    )
