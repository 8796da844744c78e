"""RMSNorm: torch, compiled torch, Liger, quack and ours.

Operations an element, counting a multiply-add as two: forward mean of squares 2, normalise 1, scale
1; backward x̂ 1, dy·γ 1, the sum 2, dx 3, dγ 2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness.case import Implementation, Inputs
from benchmarks.operators.norm import Norm, peer
from hfai.nn import RMSNorm as HfaiRMSNorm


class RMSNorm(Norm):
    """`torch.nn.RMSNorm` over the last dimension, with weight."""

    name = "rms_norm"
    eps = 1e-6
    leaves = ("x", "weight")
    forward_operations = 4
    backward_operations = 9
    torch_class = nn.RMSNorm
    hfai_class = HfaiRMSNorm

    def functional(self, length: int, *leaves: Tensor) -> Tensor:
        """Call `torch.nn.functional.rms_norm`."""
        x, weight = leaves
        return F.rms_norm(x, (length,), weight, self.eps)

    def peers(self, device: torch.device, grid: bool) -> list[Implementation]:
        """Return Liger, and outside the grid quack."""
        peers = [peer("liger", device, self._liger)]
        return peers if grid else [*peers, peer("quack", device, self._quack)]

    def rows_in_float64(
        self, x: Tensor, dy: Tensor, parameters: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        """Compute x̂ = x / rms(x); y = x̂γ; dx = (dyγ − x̂·mean(dyγ·x̂)) / rms(x); dγ = Σ dy·x̂."""
        reciprocal = (x.square().mean(1, keepdim=True) + self.eps).rsqrt()
        normal = x * reciprocal
        scaled = dy * parameters["weight"]
        along = (scaled * normal).mean(1, keepdim=True)
        dx = (scaled - normal * along) * reciprocal
        return normal * parameters["weight"], dx, {"weight": (dy * normal).sum(0)}

    def _liger(self) -> Implementation:
        from liger_kernel.ops.rms_norm import LigerRMSNormFunction

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            x, weight = inputs.leaves.values()
            # Its defaults: dx is written over dy (the other way costs it a fill of dx besides).
            return lambda: LigerRMSNormFunction.apply(x, weight, self.eps)

        return Implementation("liger", bind, overwrites_grad_output=True)

    def _quack(self) -> Implementation:
        from quack import rmsnorm

        def bind(inputs: Inputs) -> Callable[[], Tensor]:
            x, weight = inputs.leaves.values()
            return lambda: rmsnorm(x, weight, eps=self.eps)

        return Implementation("quack", bind)
