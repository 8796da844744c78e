"""LayerNorm and RMSNorm on the GPU: what is covered, and the differentiable call.

The way of a call: `why_not_covered` (may it run here?) → `normalise` → `autograd.Normalise` →
`launch` → the kernels in forward.cu, backward.cu, column_sums.cu, or long_rows.cu.
"""

from hfai.kernels.layer_norm.call import normalise, why_not_covered, why_not_dtype

__all__ = ["normalise", "why_not_covered", "why_not_dtype"]
