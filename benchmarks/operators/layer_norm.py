"""LayerNorm: torch, compiled torch, Liger, quack and ours.

Operations an element, counting a multiply-add as two: forward mean 1, variance 3, normalise 2,
scale and shift 2; backward x̂ 2, dy·γ 1, two sums 3, dx 5, dγ 2, dβ 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.case import Implementation, Inputs
from benchmarks.operators.norm import Norm, peer
from hfai.nn import LayerNorm as HfaiLayerNorm


class LayerNorm(Norm):
    """`torch.nn.LayerNorm` over the last dimension, with weight and bias."""

    name = "layer_norm"
    eps = 1e-5
    leaves = ("x", "weight", "bias")
    forward_operations = 8
    backward_operations = 14
    torch_class = nn.LayerNorm
    hfai_class = HfaiLayerNorm

    def functional(self, length: int, *leaves: Tensor) -> Tensor:
        """Call `torch.nn.functional.layer_norm`."""
        x, weight, bias = leaves
        return F.layer_norm(x, (length,), weight, bias, self.eps)

    def peers(self, device: torch.device, grid: bool) -> list[Implementation]:
        """Return Liger, and outside the grid quack."""
        peers = [peer("liger", device, self._liger)]
        return peers if grid else [*peers, peer("quack", device, self._quack)]

    def rows_in_float64(
        self, x: Tensor, dy: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute y = x̂γ + β; dx = (dyγ − mean(dyγ) − x̂·mean(dyγ·x̂))/σ; dγ = Σ dy·x̂; dβ = Σ dy."""
        centred = x - x.mean(1, keepdim=True)
        reciprocal = (centred.square().mean(1, keepdim=True) + self.eps).rsqrt()
        normal = centred * reciprocal
        scaled = dy * parameters["weight"]
        along = (scaled * normal).mean(1, keepdim=True)
        dx = (scaled - scaled.mean(1, keepdim=True) - normal * along) * reciprocal
        y = normal * parameters["weight"] + parameters["bias"]
        return y, dx, {"weight": (dy * normal).sum(0), "bias": dy.sum(0)}

    def _liger(self) -> Implementation:
        from liger_kernel.ops.layer_norm import LigerLayerNormFunction

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            x, weight, bias = inputs.leaves.values()
            return lambda: LigerLayerNormFunction.apply(x, weight, bias, self.eps)

        return Implementation("liger", bind)

    def _quack(self) -> Implementation:
        from quack.rmsnorm import layernorm_bwd, layernorm_fwd

        class Function(torch.autograd.Function):
            """quack has kernels for both passes but no autograd function around them.

            They take fp32 weights only, so they are given fp32 copies made beforehand.
            """

            @staticmethod
            def forward(
                ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float, *fp32: Tensor
            ) -> Tensor:
                rows = x.reshape(-1, x.shape[-1])
                y, rstd, mean = layernorm_fwd(
                    rows, *fp32, eps=eps, return_rstd=True, return_mean=True
                )
                ctx.save_for_backward(rows, fp32[0], rstd, mean)
                output: Tensor = y.view_as(x)
                return output

            @staticmethod
            def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
                rows, weight, rstd, mean = ctx.saved_tensors
                dx, dweight, dbias = layernorm_bwd(rows, weight, dy.reshape_as(rows), rstd, mean)
                return dx.view_as(dy), dweight, dbias, None, None, None

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            x, weight, bias = inputs.leaves.values()
            fp32 = weight.detach().float(), bias.detach().float()
            apply: Callable[..., Tensor] = Function.apply
            return lambda: apply(x, weight, bias, self.eps, *fp32)

        return Implementation("quack", bind)
