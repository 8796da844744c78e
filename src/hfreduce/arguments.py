"""What callers may give a reducer, and what they are told where it makes no sense."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

from torch import Tensor

from hfreduce import segment
from hfreduce.tensors import Flat, flat


def tensor(value: object) -> Tensor:
    """Return a tensor as it is.

    Raises:
        TypeError: It is something else.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"a {type(value).__name__} was given where a torch.Tensor is needed")
    return value


def parts(
    world_size: int,
    given: Tensor | Sequence[Tensor],
    like: Tensor,
    name: str,
    *,
    equal: bool = False,
) -> list[Flat]:
    """Return a part for each rank, of a list or of one tensor that is split evenly.

    Args:
        world_size: The number of ranks.
        given: What the caller gave.
        like: A tensor whose type all parts have.
        name: What the caller knows it by.
        equal: All parts have the size of `like` too.

    Raises:
        ValueError: They do not fit.
    """
    if isinstance(given, Tensor):
        if given.numel() % world_size:
            raise ValueError(
                f"{name} has {given.numel()} elements, which {world_size} ranks cannot share "
                f"evenly: give a list of tensors, one for each rank"
            )
        if not given.is_contiguous():
            raise ValueError(f"{name} is not contiguous: give a list of tensors, or a copy")
        whole = given.detach().view(-1)
        given = whole.chunk(world_size) if whole.numel() else [whole] * world_size
    if len(given) != world_size:
        raise ValueError(f"{name} has {len(given)} tensors for {world_size} ranks")
    for index, part in enumerate(given):
        if tensor(part).dtype != like.dtype:
            raise ValueError(f"{name}[{index}] is {part.dtype}, the tensor is {like.dtype}")
        if equal and part.numel() != like.numel():
            raise ValueError(
                f"{name}[{index}] has {part.numel()} elements, the tensor {like.numel()}"
            )
    return [flat(part) for part in given]


def check_rank(rank: int, world_size: int) -> None:
    """Refuse a rank that is none."""
    if not 0 <= rank < world_size:
        raise ValueError(f"rank={rank} is not in 0 … {world_size - 1} (world_size={world_size})")


def check_layout(
    world_size: int, threads: int | None, chunk_bytes: int, slots: int = segment.SLOTS
) -> None:
    """Refuse a memory that cannot be laid out."""
    if not 4 <= slots <= 64:
        raise ValueError(f"slots={slots} is not in 4 … 64")
    if world_size > segment.MOST_RANKS:
        raise ValueError(f"world_size={world_size}: a group has at most {segment.MOST_RANKS} ranks")
    if threads is not None and not 1 <= threads <= 64:
        raise ValueError(f"threads={threads} is not in 1 … 64")
    if chunk_bytes < segment.LEAST_CHUNK_BYTES or chunk_bytes % 64:
        raise ValueError(
            f"chunk_bytes={chunk_bytes} is no multiple of 64 from {segment.LEAST_CHUNK_BYTES} on"
        )


def seconds(timeout: float | timedelta) -> float:
    """Return a timeout in seconds.

    Raises:
        ValueError: It is not positive, or as good as endless.
    """
    number = timeout.total_seconds() if isinstance(timeout, timedelta) else float(timeout)
    if not 0 < number < 1e8:
        raise ValueError(f"timeout={timeout} is not a positive number of seconds")
    return number
