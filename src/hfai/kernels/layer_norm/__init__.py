"""LayerNorm and RMSNorm on the GPU: what is covered, and the differentiable call.

The way of a call: `call.normalise` (may it run here?) → `autograd.Normalise` → `launch` → the
kernels in forward.cu, backward.cu and column_sums.cu, or long_rows.cu, laid out by `plan` and
compiled by `programs`.
"""

from hfai.kernels.layer_norm.call import (
    is_mix_that_torch_refuses,
    normalise,
    why_not_configured,
)

__all__ = ["is_mix_that_torch_refuses", "normalise", "why_not_configured"]
