"""LSTM, GRU and RNN on the GPU: one cooperative launch for all steps of a layer, a pass.

The way of a call: `call.configure` (may it run here, and with which plan of `plan` and `dispatch`?)
-> `call.run_stack` -> `autograd.Layer` -> the input's product (`products`) and `launch` -> the
kernels in forward.cu and backward.cu, compiled by `programs`. `formula` has the recurrence in
torch's operators, for derivatives of derivatives; `status` says when a kernel gave up waiting.
"""
