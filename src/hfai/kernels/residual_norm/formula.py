"""The same function in torch's operators: what is tested against, and gradients of gradients."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

Needed = tuple[bool, bool, bool, bool, bool]


def kept(mask: Tensor, shape: torch.Size) -> Tensor:
    """Return the mask's bits as a bool tensor of `shape`."""
    bits = mask.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (bits & 1).bool().view(shape)


def gradients(
    given: tuple[Tensor | None, Tensor | None, Tensor | None],
    z: Tensor,
    weight: Tensor | None,
    bias_like: Tensor | None,
    eps: float,
    keep: Tensor | None,
    scale: float,
    types: tuple[torch.dtype, torch.dtype, torch.dtype],
    needed: Needed,
) -> list[Tensor | None]:
    """Return the gradients of branch, branch_bias, residual, weight and bias.

    They are functions of z, of the weight and of what was given, differentiable where grad mode is
    on: from z the next gradient goes on to branch and residual through the node that made z.

    Args:
        given: the gradients of z, y and half; None where there is none.
        z: residual + dropout(branch + branch_bias).
        weight: LayerNorm's.
        bias_like: zeros of the shape and type of LayerNorm's bias, or None where it has none.
        eps: LayerNorm's.
        keep: what dropout kept, bool; None without dropout.
        scale: 1 / (1 - probability of dropping).
        types: of branch, residual and the parameters.
        needed: which gradients are wanted, in the order of the result.
    """
    create_graph = torch.is_grad_enabled()
    dz, dy, dhalf = given
    with torch.enable_grad(), torch.autocast(z.device.type, enabled=False):
        dtype = torch.promote_types(z.dtype, types[2])
        # Aliases: z may itself be made with this weight (one norm applied twice), and the paths
        # through z's own history are the caller's to follow.
        z = z.view_as(z) if z.requires_grad else z.detach().requires_grad_()
        if weight is not None:
            has_history = weight.requires_grad
            weight = weight.view_as(weight) if has_history else weight.detach().requires_grad_()
        inputs = [tensor for tensor in (z, weight, bias_like) if tensor is not None]
        whole: Tensor | None = dz
        found: dict[int, Tensor] = {}
        coming = [gradient.to(dtype) for gradient in (dy, dhalf) if gradient is not None]
        if coming:
            y = F.layer_norm(
                z.to(dtype),
                z.shape[-1:],
                None if weight is None else weight.to(dtype),
                None if bias_like is None else bias_like.to(dtype),
                eps,
            )
            total = coming[0] if len(coming) == 1 else coming[0] + coming[1]
            made = torch.autograd.grad(y, inputs, total, create_graph=create_graph)
            found = {id(tensor): gradient for tensor, gradient in zip(inputs, made, strict=True)}
            from_y = found[id(z)]
            whole = from_y if dz is None else dz + from_y
        assert whole is not None
        dropped = whole if keep is None else torch.where(keep, whole * scale, 0.0)
        results = [
            dropped.to(types[0]),
            dropped.flatten(0, -2).sum(0).to(types[2]),
            whole.to(types[1]),
            found.get(id(weight)),
            found.get(id(bias_like)),
        ]
    return [result if need else None for result, need in zip(results, needed, strict=True)]
