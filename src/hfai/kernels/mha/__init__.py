"""Multi-head attention around a fused core: what is covered, and the differentiable call.

The way of a call: `call.attend` (may it run here?) → `projections` (one product for q, k and v, which
stay views of its output) → `dispatch` (which core) → `autograd.Attend` → `cores` → the output
product. Averaged weights come from the core where it writes them, else from `weights`.
"""
