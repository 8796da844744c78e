"""Large matrix products in fp32's own accuracy, made by Hopper's bf16 tensor cores.

Plain fp32 runs at 51 TFLOP/s on an H200 where bf16 reaches 790. An fp32 number is the sum of three
bf16 ones (split.cu), and six of the nine products of such parts hold all that fp32 can
(product.cu): a sixth of bf16's rate is still two and a half times fp32's. What the tensor cores'
sums lose is kept small by adding up 32 of the summed dimension there and those sums outside.

`docs/kernels/products.md` has the bound on the error, what it rests on, and the figures.
"""

from hfai.kernels.products.autograd import linear
from hfai.kernels.products.call import multiply, why_not, why_not_size

__all__ = ["linear", "multiply", "why_not", "why_not_size"]
