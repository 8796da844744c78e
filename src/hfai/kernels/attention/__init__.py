"""Attention of short sequences on the GPU: what is covered, and the differentiable calls.

    softmax(scale * q k^T + masks) v          for at most 256 rows and 256 keys

`supports` says, from types, shapes and strides alone, whether a call is covered. `attention` takes
q, k and v as views [batch, rows, heads, head_dim] of whatever memory they lie in;
`packed_attention` takes one input product [batch, rows, 3 * embed_dim] (or sequence first) and
leaves its gradient in one tensor. Neither copies or transposes. Both are differentiable, also
twice.

The way of a call: `call.supports` -> `autograd.Attention` or `PackedAttention` -> `launch`
(`attention_forward`, `attention_backward`, `attention_weights`) -> the kernels in forward.cu,
backward.cu and weights.cu, laid out by `plan` and compiled by `programs`. `formula` has the same in
torch's operators, for derivatives of derivatives and for gradients into the weights.
"""

from hfai.kernels.attention.autograd import attention, packed_attention
from hfai.kernels.attention.call import supports, supports_packed
from hfai.kernels.attention.launch import (
    attention_backward,
    attention_forward,
    attention_weights,
)
from hfai.kernels.attention.masking import Masking

__all__ = [
    "Masking",
    "attention",
    "attention_backward",
    "attention_forward",
    "attention_weights",
    "packed_attention",
    "supports",
    "supports_packed",
]
