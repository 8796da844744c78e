"""Tensors as the engine sees them: an address, and so many bytes there.

A tensor whose elements do not lie in order goes through a copy that does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class Flat:
    """A tensor's elements in order."""

    __slots__ = ("_data", "_tensor", "nbytes")

    def __init__(self, tensor: Tensor, data: Tensor) -> None:
        self._tensor, self._data = tensor, data
        self.nbytes = data.numel() * data.element_size()

    def pointer(self) -> int:
        """Return where the elements lie."""
        return self._data.data_ptr()

    def elements(self) -> Tensor:
        """Return the elements as a tensor of one dimension, which has their memory."""
        return self._data.view(-1)

    def load(self) -> None:
        """Bring the copy up to date, if there is one."""
        if self._data is not self._tensor:
            self._data.copy_(self._tensor)

    def store(self) -> None:
        """Write the copy back, if there is one."""
        if self._data is not self._tensor:
            self._tensor.copy_(self._data)


def flat(tensor: Tensor) -> Flat:
    """Return a tensor's elements in order.

    Raises:
        ValueError: The tensor has no plain memory on the CPU.
    """
    if tensor.layout != torch.strided:
        raise ValueError(f"a tensor of layout {tensor.layout} was given: make it dense first")
    if tensor.device.type != "cpu":
        raise ValueError(
            f"a tensor on {tensor.device} was given: only all_reduce takes those of GPUs"
        )
    tensor = tensor.detach()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return Flat(tensor, tensor)
    return Flat(tensor, torch.empty_like(tensor, memory_format=torch.contiguous_format))


def pointers(parts: Sequence[Flat]) -> list[int]:
    """Return where the elements of each lie."""
    return [part.pointer() for part in parts]
