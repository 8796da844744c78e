"""Which calls of the cells the kernels cover, and how such a call is made."""

from __future__ import annotations

import torch
from torch import Tensor, is_autocast_enabled

from hfai.kernels import jit
from hfai.kernels.cell.autograd import attach
from hfai.kernels.cell.programs import Configuration
from hfai.kernels.coverage import PLAIN_TYPES, why_not_plain, why_watched
from hfai.kernels.rnn.plan import Cell

DTYPES = (torch.float32, torch.float16, torch.bfloat16)

# None: calls like this are torch's.
_configurations: dict[tuple[object, ...], Configuration | None] = {}
# One for each cell, type and device, whatever the keys above.
_made: dict[tuple[Cell, torch.dtype, int], Configuration] = {}


def step(
    cell: Cell,
    x: Tensor,
    h: Tensor | None,
    c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, ...] | None:
    """Make one step by our kernels, differentiably, or return None: torch's turn.

    Args:
        cell: which recurrence.
        x: [batch, inputs].
        h: [batch, hidden], or None for zeros.
        c: as h; LSTM only.
        w_ih: [gates * hidden, inputs].
        w_hh: [gates * hidden, hidden].
        b_ih: [gates * hidden], or None.
        b_hh: given or not as b_ih.

    Returns:
        h, and with LSTM c, after the step; None where the kernels do not cover the call.
    """
    if type(x) not in PLAIN_TYPES or not x.is_cuda:  # before anything that torch.fx would record
        return None
    key = (
        cell,
        x.dtype,
        x.get_device(),
        type(h),
        type(c),
        type(w_ih),
        type(w_hh),
        type(b_ih),
        type(b_hh),
        is_autocast_enabled("cuda"),
    )
    try:
        configuration = _configurations[key]
    except KeyError:
        if why_watched() or why_not_plain(x):
            return None  # says nothing of the next call with this key
        reason = why_not_configured(x, (h, c, w_ih, w_hh, b_ih, b_hh), key[-1] is True)
        configuration = None if reason is not None else _configuration(cell, x)
        _configurations[key] = configuration
    if configuration is None or why_watched() is not None:
        return None
    if h is None:
        if x.dim() != 2:
            return None
        h = x.new_zeros(x.shape[0], w_hh.shape[-1])
        c = h if cell.has_c else None
    return configuration.run(x, h, c, w_ih, w_hh, b_ih, b_hh)


def why_not_configured(
    x: Tensor, others: tuple[Tensor | None, ...], autocast: bool = False
) -> str | None:
    """Say what in types and devices is not covered, or None.

    Args:
        x: an input; only its type, dtype and device count.
        others: states and parameters; only their types count.
        autocast: whether autocast is on for CUDA.
    """
    if autocast:
        return "under autocast"
    if x.dtype not in DTYPES:
        return f"{x.dtype} is not among fp32, fp16 and bf16"
    for tensor in others:
        if tensor is not None and type(tensor) not in PLAIN_TYPES:
            return f"a {type(tensor).__name__} is a tensor subclass"
    return why_not_plain(x) or jit.why_unavailable(x.get_device())


def _configuration(cell: Cell, x: Tensor) -> Configuration:
    key = (cell, x.dtype, x.get_device())
    configuration = _made.get(key)
    if configuration is None:
        configuration = Configuration(*key)
        attach(configuration)
        configuration = _made.setdefault(key, configuration)
    return configuration
