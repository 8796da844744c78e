"""Multi-head attention around a fused core: what is covered, and the differentiable call.

The way of a call: `call.attend` (may it run here?) → `projections` (one product for q, k and v,
which stay views of its output) → our kernel of short sequences, `kernels.attention`, where that
covers the call; else `dispatch` (which of torch's operators) → `autograd.Attend` → `cores`, and
`weights` beside them → the output product. Under torch.compile `traced` stands for all of it.
"""
