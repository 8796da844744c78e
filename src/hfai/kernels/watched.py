"""Gradients by torch's own operators, for backward passes that are themselves watched.

Kernels have no derivative of their derivative, and functorch's transforms can't see them. Where a
backward pass is differentiated (`create_graph`), batched (`is_grads_batched`) or otherwise watched,
the operator's formula is run again in torch and differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

Sources = tuple[Tensor | None, ...]


def gradients_by_formula(
    formula: Callable[[Sources], Sequence[Tensor | None]],
    sources: Sources,
    gradients: Sequence[Tensor | None],
    needed: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of `sources`, None where not needed.

    Args:
        formula: computes the operator's outputs from its sources, with torch's operators.
        sources: what the operator was called with.
        gradients: of the outputs, None for zeros; shaped like them or a view away from it. Outputs
            beyond the last are without.
        needed: of which sources.
    """
    create_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast("cuda", enabled=False):
        # An alias for each place: the same tensor may stand in several, and one may be made of
        # another (a state carried over); those paths are the caller's to follow.
        sources = tuple(None if tensor is None else tensor.view_as(tensor) for tensor in sources)
        pairs = [
            (output, gradient.reshape(output.shape))
            for output, gradient in zip(formula(sources), gradients, strict=False)
            if output is not None and gradient is not None
        ]
        wanted = [t for t, need in zip(sources, needed, strict=True) if need and t is not None]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [gradient for _, gradient in pairs],
                create_graph=create_graph,
                allow_unused=True,
            )
        )
    return [
        next(found) if need and t is not None else None
        for t, need in zip(sources, needed, strict=True)
    ]
