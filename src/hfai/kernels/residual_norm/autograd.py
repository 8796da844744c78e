"""The autograd node around the kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.residual_norm import formula, launch
from hfai.kernels.residual_norm.programs import Configuration

ALIGNMENT = 16


class Outputs(NamedTuple):
    """What a call returns.

    Attributes:
        z: residual + dropout(branch + branch_bias), or None where nobody asked for it.
        y: LayerNorm(z), or None likewise.
        half: y in the branch's type, or None likewise. A gradient that comes back through it is
            added to y's inside the kernel.
    """

    z: Tensor | None
    y: Tensor | None
    half: Tensor | None


class ResidualNorm(Function):
    """z, y, half = the forward kernel; see `Outputs`."""

    @staticmethod
    def forward(
        ctx: Any,
        branch: Tensor,
        branch_bias: Tensor | None,
        residual: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        configuration: Configuration,
        eps: float,
        dropout: float,
        y: bool,
        half: bool,
    ) -> tuple[Tensor | None, ...]:
        """Run the kernel. z is an output always: gradients of gradients go through it."""
        made = launch.forward(
            configuration,
            branch,
            branch_bias,
            residual,
            weight,
            bias,
            eps,
            dropout,
            z=True,
            y=y,
            half=half,
            for_backward=True,
        )
        ctx.save_for_backward(made.z, weight, made.statistics, made.mask)
        ctx.constants = (configuration, eps, dropout)
        ctx.set_materialize_grads(False)
        return made.z, made.y, made.half

    @staticmethod
    def backward(
        ctx: Any, dz: Tensor | None, dy: Tensor | None, dhalf: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Run the backward kernels, or torch's operators where this pass is itself watched."""
        z, weight, statistics, mask = ctx.saved_tensors
        configuration, eps, dropout = ctx.constants
        needed = ctx.needs_input_grad[:5]
        given = (dz, dy, dhalf)
        nothing: tuple[None, ...] = (None,) * 5
        if dz is None and dy is None and dhalf is None:
            return (*nothing, *nothing)
        if (
            torch.is_grad_enabled()
            or why_watched() is not None
            or not all(_is_plain(g) for g in given)
            or not _is_as_saved(configuration, z, weight, statistics, mask)
        ):
            found = _by_formula(configuration, given, z, weight, mask, eps, dropout, needed)
        else:
            found = launch.backward(
                configuration,
                (_ready(dz), _ready(dy), _ready(dhalf)),
                z,
                weight,
                statistics,
                mask,
                dropout,
                needed,
            )
        return (*found, *nothing)


# `apply` without the Python wrapper around it, whose functorch check the caller has made already.
apply_residual_norm: Callable[..., tuple[Tensor, Tensor | None, Tensor | None]] = super(
    Function, ResidualNorm
).apply


def is_ready(tensor: Tensor) -> bool:
    """Return whether the kernels read a tensor as it lies."""
    return (
        tensor.is_contiguous()
        and tensor.data_ptr() % ALIGNMENT == 0
        and not tensor.is_neg()
        and not tensor._is_zerotensor()
    )


def _ready(tensor: Tensor | None) -> Tensor | None:
    """Return the values as the kernels read them."""
    if tensor is None or is_ready(tensor):
        return tensor
    return tensor.resolve_neg().clone(memory_format=torch.contiguous_format)


def _is_plain(tensor: Tensor | None) -> bool:
    return tensor is None or (type(tensor) in PLAIN_TYPES and torch._C._has_storage(tensor))


def _is_as_saved(
    configuration: Configuration,
    z: Tensor,
    weight: Tensor | None,
    statistics: Tensor,
    mask: Tensor | None,
) -> bool:
    """Return whether what saved-tensor hooks gave back is what was saved."""
    types, length = configuration.types, configuration.row_length
    rows = z.numel() // length
    return (
        _is_saved(configuration, z, types.z)
        and z.shape[-1] == length
        and _is_saved(configuration, statistics, torch.float32)
        and statistics.shape == (2, rows)
        and (
            mask is None
            or (_is_saved(configuration, mask, torch.uint8) and mask.shape == (rows, length // 8))
        )
        and (
            weight is None
            or (_is_saved(configuration, weight, types.parameters) and weight.shape == (length,))
        )
    )


def _is_saved(configuration: Configuration, tensor: Tensor, dtype: torch.dtype) -> bool:
    return (
        type(tensor) in PLAIN_TYPES
        and tensor.dtype is dtype
        and tensor.get_device() == configuration.device
        and torch._C._has_storage(tensor)
        and is_ready(tensor)
    )


def _by_formula(
    configuration: Configuration,
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    z: Tensor,
    weight: Tensor | None,
    mask: Tensor | None,
    eps: float,
    dropout: float,
    needed: formula.Needed,
) -> list[Tensor | None]:
    types = configuration.types
    bias_like = None
    if needed[4]:  # its value does not enter the gradients
        bias_like = z.new_zeros((configuration.row_length,), dtype=types.parameters)
        bias_like.requires_grad_()
    return formula.gradients(
        given,
        z,
        weight,
        bias_like,
        eps,
        None if mask is None else formula.kept(mask, z.shape),
        1.0 / (1.0 - dropout),
        (types.branch, types.residual, types.parameters),
        needed,
    )
