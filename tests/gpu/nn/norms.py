"""Ours, torch's and a float64 LayerNorm or RMSNorm side by side, and what a call runs on the GPU.

A `Variant` says which parameters there are, a `Mix` which types meet. `Trial` builds the layers for
one shape, runs ours over poisoned memory, and compares its errors against float64 with torch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hfai.nn
from tests.nn.operator_cases import layer_norm_reference, rms_norm_reference

CUDA = torch.device("cuda")


@dataclass(frozen=True)
class Variant:
    """Which layer, with which of its parameters."""

    name: str
    layer: str
    weight: bool
    bias: bool


LAYER_NORM = Variant("LayerNorm", "LayerNorm", weight=True, bias=True)
RMS_NORM = Variant("RMSNorm", "RMSNorm", weight=True, bias=False)
VARIANTS = [
    LAYER_NORM,
    Variant("LayerNorm-no-bias", "LayerNorm", weight=True, bias=False),
    Variant("LayerNorm-no-weight", "LayerNorm", weight=False, bias=True),
    Variant("LayerNorm-no-affine", "LayerNorm", weight=False, bias=False),
    RMS_NORM,
    Variant("RMSNorm-no-affine", "RMSNorm", weight=False, bias=False),
]


@dataclass(frozen=True)
class Mix:
    """The types of the input and of the parameters, and whether autocast to bf16 is on."""

    name: str
    input: torch.dtype
    parameters: torch.dtype
    autocast: bool = False


FP32 = Mix("fp32", torch.float32, torch.float32)
FP16 = Mix("fp16", torch.float16, torch.float16)
BF16 = Mix("bf16", torch.bfloat16, torch.bfloat16)
# Not in torch on CUDA; there the reference for errors is a cast before and after.
BF16_FP32 = Mix("bf16-fp32-parameters", torch.bfloat16, torch.float32)
AUTOCAST = Mix("autocast", torch.bfloat16, torch.float32, autocast=True)
MIXES = [FP32, FP16, BF16, BF16_FP32, AUTOCAST]


def build(variant: Variant, length: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build our layer with random parameters on the GPU."""
    cls = getattr(hfai.nn, variant.layer)
    layer: nn.Module = cls(
        length, eps=1e-5, elementwise_affine=variant.weight, device=CUDA, dtype=dtype
    )
    if variant.weight:
        nn.init.uniform_(layer.weight, -1.5, 1.5)
    if variant.layer == "LayerNorm":
        bias = torch.empty(length, device=CUDA, dtype=dtype).uniform_(-1, 1)
        layer.bias = nn.Parameter(bias) if variant.bias else None
    return layer


def as_torch(layer: nn.Module, *, double: bool = False) -> nn.Module:
    """Return torch's class around copies of the same parameters, in float64 if asked."""
    cls = nn.LayerNorm if isinstance(layer, nn.LayerNorm) else nn.RMSNorm
    plain: nn.Module = cls(layer.normalized_shape, layer.eps, elementwise_affine=False)
    for name in ("weight", "bias"):
        value = getattr(layer, name, None)
        if value is not None:
            copied = value.detach().clone()
            setattr(plain, name, nn.Parameter(copied.double() if double else copied))
    return plain


def poison(*byte_counts: int) -> None:
    """Leave NaNs (and, read as integers, -1) in the memory that is handed out next."""
    blocks = [
        torch.full((count,), 255, dtype=torch.uint8, device=CUDA)
        for count in (*byte_counts, *(512 * 4**n for n in range(8)))
        for _ in range(4)
    ]
    del blocks


def kernels(call: Callable[[], Any]) -> list[str]:
    """Run a call that has run before and return the names of the kernels it put on the GPU."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return [
        event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    ]


def is_ours(kernel: str) -> bool:
    """Tell our kernels by their name."""
    return "hfai" in kernel


def is_torchs_norm(kernel: str) -> bool:
    """Tell the kernels of torch's own LayerNorm and RMSNorm by their names."""
    name = kernel.lower().replace("_", "")
    return not is_ours(kernel) and any(
        part in name for part in ("layernorm", "rmsnorm", "gammabeta", "rowwisemoments")
    )


@dataclass(frozen=True)
class Trial:
    """One shape, variant and mix: ours, torch's and float64's outputs and gradients."""

    variant: Variant
    mix: Mix
    rows: int
    length: int

    def __str__(self) -> str:
        return f"{self.variant.name} {self.mix.name} {self.rows}×{self.length}"

    def failures(self, factor: float = 1.5) -> Iterator[str]:
        """Yield what is more than `factor` times as wrong as torch, by norm or at its worst place.

        Beyond that, rounding is forgiven: a part of one in the result's own type, for the cast, and
        of one in fp32 in the terms that it is the sum of.
        """
        results, scales = self._run()
        fp32 = torch.finfo(torch.float32).eps
        numbers, labels = [], []
        for name, expected in results["float64"].items():
            ours, torchs, scale = results["hfai"][name], results["torch"][name], scales[name]
            label = f"{self} {name}"
            assert ours.shape == expected.shape, f"{label}: shape {tuple(ours.shape)}"
            assert ours.dtype == torchs.dtype, f"{label}: {ours.dtype}, torch {torchs.dtype}"
            cast = torch.finfo(ours.dtype).eps
            # One term twice over counts in full: a nearly constant row may outweigh all others.
            largest = 2 * (cast * _maximum(expected) + fp32 * _maximum(scale))
            spread = 0.25 * (cast * _norm(expected) + fp32 * _norm(scale))
            for measure, size, slack in (
                ("norm", _norm, largest + spread),
                ("maximum", _maximum, largest),
            ):
                errors = (size(result.double() - expected) for result in (ours, torchs))
                numbers += [*errors, slack]
                labels.append(f"{label}, {measure} of the error")
        values = iter(torch.stack(numbers).tolist())
        for label, ours_error, torch_error, slack in zip(
            labels, values, values, values, strict=True
        ):
            if not ours_error <= factor * torch_error + slack:  # NaN is not, either
                yield f"{label}: {ours_error:.3g}, torch's {torch_error:.3g}, slack {slack:.3g}"

    def _run(self) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
        """Return y and the gradients of each implementation, and the size of their terms."""
        layer = build(self.variant, self.length, self.mix.parameters)
        plain, double = as_torch(layer), as_torch(layer, double=True)
        x = torch.randn(self.rows, self.length, device=CUDA) * 1.5 + 0.3
        x = x.to(self.mix.input).requires_grad_()
        with torch.autocast("cuda", torch.bfloat16, enabled=self.mix.autocast):
            if self.mix.autocast or self.mix.input == self.mix.parameters:
                y = plain(x)
            else:
                y = plain(x.to(self.mix.parameters)).to(self.mix.input)
            self._poison(x, y)
            y_ours = layer(x)
        assert y_ours.dtype == y.dtype, f"{self}: {y_ours.dtype}, and torch gives {y.dtype}"
        dy = torch.randn_like(y)
        results = {"torch": _gradients(y, x, plain, dy)}
        self._poison(x, y)
        results["hfai"] = _gradients(y_ours, x, layer, dy)
        x_double, dy_double = x.detach().double().requires_grad_(), dy.double()
        norm = layer_norm_reference if self.variant.layer == "LayerNorm" else rms_norm_reference
        y_double = norm(double, x_double)  # type: ignore[operator]
        results["float64"] = _gradients(y_double, x_double, double, dy_double)
        return results, self._scales(double, x_double.detach(), dy_double)

    def _poison(self, x: Tensor, y: Tensor) -> None:
        poison(x.nbytes, y.nbytes, 4 * self.rows, 8 * self.rows, 4 * self.length, 8 * self.length)

    def _scales(self, double: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
        """Return the size of the terms of each result: what a rounding in them is relative to."""
        centred = x - x.mean(-1, keepdim=True) if self.variant.layer == "LayerNorm" else x
        rstd = (centred.square().mean(-1, keepdim=True) + double.eps).rsqrt()
        weight = getattr(double, "weight", None)
        bias = getattr(double, "bias", None)
        # x and its mean are rounded before they are subtracted, so x counts and not x - mean.
        xhat = x.abs() * rstd
        y = xhat if weight is None else xhat * weight.detach().abs()
        g = dy if weight is None else dy * weight.detach()
        return {
            "y": y if bias is None else y + bias.detach().abs(),
            # Means over the row are subtracted from g; its largest element stands for them.
            "dx": rstd * g.abs().amax(-1, keepdim=True) * (1 + xhat),
            "dweight": torch.linalg.vector_norm(dy * xhat, dim=0),
            "dbias": torch.linalg.vector_norm(dy, dim=0),
        }


def _norm(tensor: Tensor) -> Tensor:
    return torch.linalg.vector_norm(tensor)


def _maximum(tensor: Tensor) -> Tensor:
    return tensor.abs().amax()  # NaN where there is one


def _gradients(y: Tensor, x: Tensor, layer: nn.Module, dy: Tensor) -> dict[str, Tensor]:
    named = {f"d{name}": parameter for name, parameter in layer.named_parameters()}
    gradients = torch.autograd.grad(y, [x, *named.values()], dy)
    return {"y": y.detach(), "dx": gradients[0]} | dict(zip(named, gradients[1:], strict=True))
