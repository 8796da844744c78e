"""LSTMCell, GRUCell and RNNCell: torch's modules with one autograd node and kernel a step.

Parameters are read by attribute on every call; nothing is kept between calls. A call that the
kernels do not cover, or that torch must refuse, goes to torch's own forward as it came.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch._jit_internal import is_scripting

from hfai.kernels.cell import call
from hfai.kernels.rnn.plan import Cell
from hfai.nn.path import Path
from hfai.nn.stand_in import as_leaf, as_method, is_compiling, proxy_among

_OF_RNN = {"tanh": Cell.RNN_TANH, "relu": Cell.RNN_RELU}


class LSTMCell(nn.LSTMCell):
    """`torch.nn.LSTMCell`, faster on CUDA for fp32, fp16 and bf16."""

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Make one step of `input`, [batch, inputs], from hx = (h, c), [batch, hidden] each."""
        if is_scripting():
            return self._scripted(input, hx)
        else:  # noqa: RET505 (TorchScript compiles what follows a return, but not this branch)
            return _lstm(self, input, hx)

    _scripted = as_method(nn.LSTMCell.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self)


class GRUCell(nn.GRUCell):
    """`torch.nn.GRUCell`, faster on CUDA for fp32, fp16 and bf16."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Make one step of `input`, [batch, inputs], from hx, [batch, hidden]."""
        if is_scripting():
            return self._scripted(input, hx)
        else:  # noqa: RET505 (as above)
            return _gru(self, input, hx)

    _scripted = as_method(nn.GRUCell.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self)


class RNNCell(nn.RNNCell):
    """`torch.nn.RNNCell` (tanh or relu), faster on CUDA for fp32, fp16 and bf16."""

    def forward(self, input: Tensor, hx: Tensor | None = None) -> Tensor:
        """Make one step of `input`, [batch, inputs], from hx, [batch, hidden]."""
        if is_scripting():
            return self._scripted(input, hx)
        else:  # noqa: RET505 (as above)
            return _rnn(self, input, hx)

    _scripted = as_method(nn.RNNCell.forward, "_scripted")

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self)


# Torch's classes by name below: a forward that was kept aside may outlive the conversion back.


def _lstm(module: nn.LSTMCell, input: Tensor, hx: Any) -> tuple[Tensor, Tensor]:
    if not is_compiling():
        if proxy_among(input, hx) is not None:
            states: tuple[Tensor, Tensor] = as_leaf(module, input, hx)
            return states
        h = c = None
        if hx is not None and isinstance(hx, (tuple, list)) and len(hx) == 2:
            h, c = hx
        if hx is None or h is not None:
            made = _step(module, Cell.LSTM, input, h, c)
            if made is not None:
                return made[0], made[1]
    return nn.LSTMCell.forward(module, input, hx)


def _gru(module: nn.GRUCell, input: Tensor, hx: Tensor | None) -> Tensor:
    if not is_compiling():
        if proxy_among(input, hx) is not None:
            state: Tensor = as_leaf(module, input, hx)
            return state
        made = _step(module, Cell.GRU, input, hx, None)
        if made is not None:
            return made[0]
    return nn.GRUCell.forward(module, input, hx)


def _rnn(module: nn.RNNCell, input: Tensor, hx: Tensor | None) -> Tensor:
    if not is_compiling():
        if proxy_among(input, hx) is not None:
            state: Tensor = as_leaf(module, input, hx)
            return state
        cell = _OF_RNN.get(module.nonlinearity)
        made = None if cell is None else _step(module, cell, input, hx, None)
        if made is not None:
            return made[0]
    return nn.RNNCell.forward(module, input, hx)


def _step(
    module: nn.RNNCellBase, cell: Cell, x: Tensor, h: Tensor | None, c: Tensor | None
) -> tuple[Tensor, ...] | None:
    return call.step(
        cell, x, h, c, module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh
    )


def _explain(module: nn.RNNCellBase) -> Path:
    """Answer for the usual case: a call without autocast, its input like the parameters."""
    if not torch.cuda.is_available():
        return Path("torch", "no CUDA device: the kernels are for CUDA")
    weights = (module.weight_ih, module.weight_hh, module.bias_ih, module.bias_hh)
    reason = call.why_not_configured(weights[0], weights)
    if reason is not None:
        return Path("torch", reason)
    return Path("hfai", "torch's products, one kernel for the rest; autocast takes torch's")
