"""LayerNorm and RMSNorm: torch's modules with hfai's kernels behind `forward`.

Parameters are read by attribute on every call, since weight norm, pruning, FSDP and adapters
replace them; nothing is kept between calls. Under `torch.compile` torch's own decomposition is
used, which the compiler fuses with what stands around it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting
from torch.nn import functional as F

from hfai.kernels import jit, layer_norm
from hfai.nn.path import Path


class LayerNorm(nn.LayerNorm):
    """`torch.nn.LayerNorm`, faster on CUDA for fp32, fp16 and bf16.

    Takes and returns what torch's class does, from the same parameters under the same names. Beyond
    it, a half-precision input may meet fp32 parameters on CUDA, as torch allows on the CPU; the
    output then has the input's type.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalise the last dimensions of `input`, [..., *normalized_shape]."""
        if is_scripting():
            return F.layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps)
        else:  # noqa: RET505 (TorchScript compiles what follows a return, but not this branch)
            weight, bias = self.weight, self.bias
            if not torch.compiler.is_compiling():
                shape = tuple(self.normalized_shape)
                y = layer_norm.normalise(input, shape, weight, bias, self.eps, True)
                if y is not None:
                    return y
            # torch's class by name: a forward that was kept aside may outlive the conversion back.
            if layer_norm.is_mix_that_torch_refuses(input, weight, bias):
                return nn.LayerNorm.forward(self, input.float()).to(input.dtype)
            return nn.LayerNorm.forward(self, input)

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self, self.weight, self.bias, True)


class RMSNorm(nn.RMSNorm):
    """`torch.nn.RMSNorm`, faster on CUDA for fp32, fp16 and bf16."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimensions of `x`, [..., *normalized_shape]."""
        if is_scripting():
            return F.rms_norm(x, self.normalized_shape, self.weight, self.eps)
        else:  # noqa: RET505 (TorchScript compiles what follows a return, but not this branch)
            if not torch.compiler.is_compiling():
                shape = tuple(self.normalized_shape)
                y = layer_norm.normalise(x, shape, self.weight, None, self.eps, False)
                if y is not None:
                    return y
            return nn.RMSNorm.forward(self, x)

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self, self.weight, None, False)


def _explain(
    module: LayerNorm | RMSNorm, weight: Tensor | None, bias: Tensor | None, centered: bool
) -> Path:
    """Answer for the usual case: a call without autocast, its input like the parameters."""
    shape = tuple(module.normalized_shape)
    like_input = bias if weight is None else weight
    if not torch.cuda.is_available():
        reason: str | None = "no CUDA device: the kernels are for CUDA"
    elif like_input is None:
        reason = jit.why_unavailable()
    else:
        reason = layer_norm.why_not_configured(
            like_input, shape, weight, bias, module.eps is None, centered, False
        )
    if reason is not None:
        return Path("torch", reason)
    length = "×".join(map(str, shape))
    return Path("hfai", f"CUDA kernels for rows of {length}; torch.compile uses torch's own")
