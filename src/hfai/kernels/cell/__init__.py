"""LSTMCell, GRUCell and RNNCell on the GPU: one step, with all but its products in one kernel.

The way of a call: `call.step` (may it run here?) → `autograd.Step`, or node.cpp once that is
compiled → torch's own products and `launch` → the kernels in cell.cu, compiled by `programs`. What
a step costs is mostly the host's time, so there is one autograd node where torch has a dozen.
"""
