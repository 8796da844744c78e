"""Random attention calls, and how far what comes out is from float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hfai.kernels.attention import formula
from hfai.kernels.attention.masking import Masking

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Of norms: rounding of operands (TF32, the half types) makes up nearly all of it.
TOLERANCES = {FP32: 1.5e-3, FP16: 1.5e-3, BF16: 1e-2}


@dataclass
class Call:
    """Operands of one call, on `device`; `dout` is the gradient that comes back."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    masking: Masking

    def expected(self) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return out, weights and the gradients of q, k, v in float64."""
        inputs = [t.detach().double().requires_grad_() for t in (self.q, self.k, self.v)]
        out, weights = formula.attention(*inputs, self.masking)
        gradients = torch.autograd.grad(out, inputs, self.dout.double())
        return out.detach(), weights.detach(), gradients


def call(
    dtype: torch.dtype, batch: int, rows: int, keys: int, heads: int, head_dim: int,
    *, masking: Masking | None = None, packed: bool = False, sequence_first: bool = False,
    device: str = "cpu", seed: int = 0,
) -> Call:  # fmt: skip
    """Draw a call; `packed` lays q, k and v out as one input product."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(shape, generator=generator, device=device, dtype=torch.float32)
        return drawn.to(dtype)

    def heads_of(count: int, length: int) -> Any:
        if sequence_first:
            return normal(length, batch, count, heads, head_dim).transpose(0, 1)
        return normal(batch, length, count, heads, head_dim)

    if packed:
        assert rows == keys
        q, k, v = heads_of(3, rows).unbind(2)
    else:
        (q,), (k,), (v,) = (heads_of(1, n).unbind(2) for n in (rows, keys, keys))
    dout = heads_of(1, rows).squeeze(2)
    return Call(q, k, v, dout, masking or Masking())


def padding(batch: int, keys: int, device: str = "cpu") -> Tensor:
    """Return a bool key_padding_mask that leaves each batch a number of keys, at least one."""
    lengths = torch.tensor([1 + (keys * (b + 1) // (batch + 1)) % keys for b in range(batch)])
    return (torch.arange(keys)[None] >= lengths[:, None]).to(device)


def error(actual: Tensor, expected: Tensor) -> float:
    """Return ||actual - expected|| / ||expected||; infinite where the NaNs of both differ.

    Of what is zero (the gradient of a score that is alone in its row) rounding is left: 1e-3 stands
    for so small a norm.
    """
    actual, expected = actual.detach().double(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    difference, scale = (actual - expected).nan_to_num().norm(), expected.nan_to_num().norm()
    return (difference / scale.clamp_min(1e-3)).item()
