"""LayerNorm of a residual sum: y = LayerNorm(residual + dropout(branch + bias)), and its gradients.

The end of every sublayer of a transformer. torch runs it as three or four kernels forward and about
six backward, each of which reads and writes all of it; here it is one each way, and one small one
for the sums over rows. Of dropout a bit an element is kept.
"""

from hfai.kernels.residual_norm.autograd import Outputs
from hfai.kernels.residual_norm.call import is_large, normalise_sum, why_not_covered

__all__ = ["Outputs", "is_large", "normalise_sum", "why_not_covered"]
