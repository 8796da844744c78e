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


RANGES = ("rows", "opposed rows", "columns", "elements", "one huge", "tiny", "sharp")


def of_range(kind: str, length: int, *, device: str = "cpu") -> Call:
    """Draw an fp32 call whose numbers are of very different sizes, in a way that `RANGES` names."""
    case = call(FP32, 1, length, length, 2, 64, device=device)
    generator = torch.Generator(device).manual_seed(1)

    def spread(*shape: int, powers: float = 20.0) -> Tensor:
        return torch.exp2(-powers * torch.rand(shape, generator=generator, device=device))

    every = (case.q, case.k, case.v, case.dout)
    rows = (1, length, 2, 1)
    if kind == "rows":
        for tensor in every:
            tensor *= 4 * spread(*rows)
    elif (
        kind == "opposed rows"
    ):  # large rows of q where dout's are small: dk has parts of all alike
        scale = spread(*rows)
        case.q.mul_(scale)
        case.dout.div_(scale)
    elif kind == "columns":
        for tensor in (case.v, case.dout):
            tensor *= spread(64)
    elif kind == "elements":
        for tensor in every:
            tensor *= spread(*tensor.shape)
    elif kind == "one huge":
        case.v[0, 7, 0] *= 1e3
        case.dout[0, 3, 0] *= 1e4
    elif kind == "tiny":
        case.v.mul_(1e-15)
        case.dout.mul_(1e-15)
    elif kind == "sharp":  # rows with one probability of 1
        case.q.mul_(8.0)
    return case


def padding(batch: int, keys: int, device: str = "cpu") -> Tensor:
    """Return a bool key_padding_mask that leaves each batch a number of keys, at least one."""
    lengths = torch.tensor([1 + (keys * (b + 1) // (batch + 1)) % keys for b in range(batch)])
    return (torch.arange(keys)[None] >= lengths[:, None]).to(device)


def error(actual: Tensor, expected: Tensor, least: float = 1e-3) -> float:
    """Return ||actual - expected|| / ||expected||; infinite where the NaNs of both differ.

    Of what is zero (the gradient of a score that is alone in its row) rounding is left: `least`
    stands for so small a norm.
    """
    actual, expected = actual.detach().double(), expected.double()
    if not torch.equal(actual.isnan(), expected.isnan()):
        return float("inf")
    difference, scale = (actual - expected).nan_to_num().norm(), expected.nan_to_num().norm()
    return (difference / scale.clamp_min(least)).item()
