"""The recurrence in torch's own operators, a step at a time: slow, and differentiable throughout.

It is what double backward and other watched passes go through; the kernels have no derivative of
their derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hfai.kernels.rnn.plan import Cell

Weights = Sequence[tuple[Tensor, Tensor, Tensor | None, Tensor | None]]
"""W_ih, W_hh, b_ih, b_hh of each direction."""


def layer(
    cell: Cell,
    x: Tensor,
    batch_sizes: Sequence[int],
    weights: Weights,
    h0: Tensor | None,
    c0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run one layer, one or both directions.

    Args:
        cell: which recurrence.
        x: [rows, inputs], step-major: `batch_sizes[t]` rows for step t.
        batch_sizes: sequences that have step t, not increasing.
        weights: of each direction.
        h0: [directions, batch, hidden], or None for zeros.
        c0: as h0; LSTM only.

    Returns:
        y [rows, directions * hidden], hn and cn (None without c), [directions, batch, hidden].
    """
    outputs, last_h, last_c = [], [], []
    for direction, (w_ih, w_hh, b_ih, b_hh) in enumerate(weights):
        zeros = x.new_zeros(batch_sizes[0], w_hh.shape[1])
        h = zeros if h0 is None else h0[direction]
        c = zeros if c0 is None else c0[direction]
        inputs = torch.nn.functional.linear(x, w_ih, b_ih).split(list(batch_sizes))  # type: ignore[no-untyped-call]
        ys: list[Tensor] = []
        steps = range(len(batch_sizes))
        for t in reversed(steps) if direction else steps:
            count = batch_sizes[t]
            hidden = torch.nn.functional.linear(h[:count], w_hh, b_hh)
            new_h, new_c = _cell(cell, inputs[t], hidden, h[:count], c[:count])
            # Sequences that have ended (or, backwards, not begun) keep what they have.
            h = new_h if count == h.shape[0] else torch.cat([new_h, h[count:]])
            c = new_c if count == c.shape[0] else torch.cat([new_c, c[count:]])
            ys.append(new_h)
        outputs.append(torch.cat(ys[::-1] if direction else ys))
        last_h.append(h)
        last_c.append(c)
    cn = torch.stack(last_c) if cell.has_c else None
    return torch.cat(outputs, -1), torch.stack(last_h), cn


def step(
    cell: Cell,
    x: Tensor,
    h: Tensor,
    c: Tensor | None,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Return h and c (None without c) after one step of [batch, …] operands."""
    from_input = torch.nn.functional.linear(x, w_ih, b_ih)
    from_hidden = torch.nn.functional.linear(h, w_hh, b_hh)
    new_h, new_c = _cell(cell, from_input, from_hidden, h, h if c is None else c)
    return new_h, new_c if cell.has_c else None


def _cell(
    cell: Cell, from_input: Tensor, from_hidden: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor]:
    if cell is Cell.GRU:
        x_reset, x_update, x_new = from_input.chunk(3, -1)
        h_reset, h_update, h_new = from_hidden.chunk(3, -1)
        update = (x_update + h_update).sigmoid()
        new = (x_new + (x_reset + h_reset).sigmoid() * h_new).tanh()
        return (1 - update) * new + update * h, c
    total = from_input + from_hidden
    if cell is Cell.LSTM:
        i, f, g, o = total.chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return o.sigmoid() * c.tanh(), c
    return (total.tanh() if cell is Cell.RNN_TANH else total.relu()), c
