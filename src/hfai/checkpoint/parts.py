"""What this rank holds of each tensor: a box of it, and how many ranks hold the same."""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfai.checkpoint.errors import StateMismatchError
from hfai.checkpoint.format import DTYPES, digest

_PLAIN = (Tensor, nn.Parameter, nn.Buffer) if hasattr(nn, "Buffer") else (Tensor, nn.Parameter)


PRIVATE = "rank/"  # begins the names of tensors that belong to one rank


class Part(NamedTuple):
    """The box of a tensor that is in this process.

    Attributes:
        name: Of the tensor.
        dtype: torch's name of its type, without "torch.".
        shape: Of the whole tensor.
        offsets: Where the box begins.
        sizes: Of the box; those of `local`.
        local: Its values, on any device, of any strides.
        replicas: Which ranks hold the same box: as many as the first number, this one's place among
            them, and a text that the ranks of these replicas share; None where that is to be found
            out, because the tensor says nothing of other ranks.
        mesh: What tells a DTensor's mesh and placements from others; "" of a plain tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    local: Tensor
    replicas: tuple[int, int, str] | None
    mesh: str = ""


def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a type without its module."""
    return str(dtype).removeprefix("torch.")


def need_stored(name: str, tensor: Tensor) -> None:
    """Refuse tensors of kinds that are not stored.

    Raises:
        TypeError: It is of one.
    """
    if type(tensor) not in _PLAIN and not is_dtensor(tensor):
        kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
        raise TypeError(
            f"{name} is a {kind}: of torch.Tensor's subclasses only DTensor is stored; give plain "
            "tensors (FSDP2 and tensor parallelism have DTensors, FSDP1 does not; lazy modules "
            "need a first batch)"
        )
    dtype = dtype_name(tensor.dtype)
    if dtype not in DTYPES:
        raise TypeError(f"{name} is of {tensor.dtype}, which is not stored: convert it")
    if tensor.is_nested:
        raise TypeError(f"{name} is a nested tensor, which is not stored: give its values")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{name} is {tensor.layout}, which is not stored: make it dense")
    if tensor.is_meta:
        raise TypeError(f"{name} is on the meta device and has no values: load or initialise it")


def part_of(name: str, tensor: Tensor) -> Part | None:
    """Return this process's part of a tensor that is stored; None where it has none.

    Raises:
        StateMismatchError: Its shards are no boxes, or still to be summed.
    """
    dtype = dtype_name(tensor.dtype)
    if type(tensor) in _PLAIN:
        zeros = (0,) * tensor.ndim
        shape = tuple(tensor.shape)
        return Part(name, dtype, shape, zeros, shape, tensor.detach(), None)
    return _part_of_dtensor(name, dtype, tensor)


def is_dtensor(tensor: object) -> bool:
    """Whether a tensor is spread over a device mesh."""
    return isinstance(tensor, Tensor) and hasattr(tensor, "device_mesh")


def _part_of_dtensor(name: str, dtype: str, tensor: Any) -> Part | None:
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(placement.is_partial() for placement in placements):
        raise StateMismatchError(
            f"{name} is a DTensor that is still to be summed ({placements}): redistribute it first"
        )
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    local = tensor.detach().to_local()
    if hasattr(local, "wait"):
        local = local.wait()
    offsets, sizes = box_of(name, tensor)
    copies = [dim for dim, placement in enumerate(placements) if placement.is_replicate()]
    replica = 0
    for dim in copies:
        replica = replica * mesh.size(dim) + coordinate[dim]
    count = math.prod(mesh.size(dim) for dim in copies)
    # Ranks that differ in their coordinates of `copies` alone hold the same boxes.
    shared = [None if dim in copies else at for dim, at in enumerate(coordinate)]
    key = f"{_description(mesh)}{shared}"
    spread = f"{_description(mesh)}{placements}"
    shape = tuple(tensor.shape)
    return Part(name, dtype, shape, offsets, sizes, local, (count, replica, key), spread)


# torch computes a mesh's ranks anew each time it is asked for them.
_descriptions: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()


def _description(mesh: Any) -> str:
    """Return what tells a mesh from others, in short: it may have thousands of ranks."""
    if mesh not in _descriptions:
        ranks = mesh.mesh
        _descriptions[mesh] = f"{digest(repr(ranks.tolist()).encode())}{tuple(ranks.shape)}"
    return _descriptions[mesh]


def box_of(name: str, tensor: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of this process's box of a DTensor.

    Raises:
        StateMismatchError: It is no box.
    """
    chunks = tensor.__create_chunk_list__()
    local = tuple(tensor.to_local().shape)
    if len(chunks) != 1 or tuple(chunks[0].sizes) != local:
        raise StateMismatchError(
            f"{name} is spread as {tensor.placements} over {tuple(tensor.device_mesh.mesh.shape)}, "
            "which gives this rank no box of it: such shards are not stored"
        )
    return tuple(chunks[0].offsets), local


def bytes_of(local: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU.

    Changing it changes the tensor.
    """
    if local.numel() == 0:
        return memoryview(b"")
    flat: Any = flat_bytes(local.detach()).numpy()
    return memoryview(flat)


def flat_bytes(local: Tensor) -> Tensor:
    """Return a contiguous tensor as one row of bytes, a view of it."""
    flat = local.reshape(-1)
    if flat.numel() == 1:  # contiguous by torch's definition, whatever its stride is
        flat = flat.as_strided((1,), (1,))
    return flat.view(torch.uint8)


def local_of(tensor: Any) -> Any:
    """Return the memory of a tensor that is in this process."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def is_readable(local: Tensor) -> bool:
    """Whether `bytes_of` gives a tensor's values as they are stored."""
    return (
        local.device.type == "cpu"
        and local.is_contiguous()
        and not local.is_conj()
        and not local.is_neg()
    )


def find_aliases(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Return names of tensors that are the same memory as one named before: name -> that name.

    What belongs to one rank is never another name of what all ranks have: of that another rank's
    values may be stored.
    """
    first: dict[tuple[object, ...], str] = {}
    aliases = {}
    for name, tensor in tensors.items():
        local = local_of(tensor)
        if local.numel() == 0 or local.layout is not torch.strided or local.is_meta:
            # No memory to be the same; a parameter that appears twice is known by itself.
            key: tuple[object, ...] = (name.startswith(PRIVATE), id(tensor))
        else:
            key = (
                name.startswith(PRIVATE),
                local.data_ptr(),
                tuple(local.shape),
                local.stride(),
                local.dtype,
                local.device,
                tuple(tensor.shape),
                local.is_conj(),
                local.is_neg(),
            )
        if key in first:
            aliases[name] = first[key]
        else:
            first[key] = name
    return aliases


def is_run(sizes: tuple[int, ...], container: tuple[int, ...]) -> bool:
    """Whether a box's items lie back to back in a row-major container."""
    partial = False
    for size, whole in zip(reversed(sizes), reversed(container), strict=True):
        if partial and size != 1:
            return False
        partial = partial or size != whole
    return True


def linear(offsets: tuple[int, ...], container: tuple[int, ...]) -> int:
    """Return how many items lie before one in a row-major container."""
    at = 0
    for offset, whole in zip(offsets, container, strict=True):
        at = at * whole + offset
    return at


def intersect(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    others: tuple[int, ...],
    other_sizes: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return what two boxes share, as offsets and sizes; None where that is nothing."""
    begin = tuple(map(max, offsets, others))
    ends = (
        min(a + n, b + m) for a, n, b, m in zip(offsets, sizes, others, other_sizes, strict=True)
    )
    size = tuple(end - start for start, end in zip(begin, ends, strict=True))
    return None if any(extent <= 0 for extent in size) else (begin, size)


def box(tensor: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return a box of a tensor, as a view."""
    spans = itertools.starmap(slice, ((o, o + s) for o, s in zip(offsets, sizes, strict=True)))
    return tensor[tuple(spans)]
