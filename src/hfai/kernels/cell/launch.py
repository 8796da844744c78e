"""Launch a cell's kernels on contiguous CUDA tensors of the current device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hfai.kernels.cell.programs import GROUP_ROWS, THREADS, UNITS, Configuration


@dataclass(frozen=True)
class Gradients:
    """What `backward` makes; the products behind it are autograd.py's.

    `d_input` and `d_hidden` [batch, gates * hidden] are the gradients of the two products, one
    tensor but for GRU. `d_state` [batch, hidden] is LSTM's dc, or what of GRU's dh passes beside
    the product. `db_ih` and `db_hh` are None where they are not needed.
    """

    d_input: Tensor
    d_hidden: Tensor
    d_state: Tensor | None
    db_ih: Tensor | None
    db_hh: Tensor | None


def forward(
    configuration: Configuration,
    from_input: Tensor,
    from_hidden: Tensor,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
    h: Tensor,
    c: Tensor | None,
    keep: bool,
) -> tuple[Tensor, Tensor | None]:
    """Make the step behind its products.

    Args:
        configuration: what fits these tensors.
        from_input: x W_ih^T, [batch, gates * hidden]; overwritten if `keep`.
        from_hidden: h W_hh^T, likewise.
        b_ih: [gates * hidden], or None.
        b_hh: given or not as b_ih.
        h: before the step, [batch, hidden].
        c: as h; LSTM only.
        keep: whether backward will follow and needs the activations in the products' place.

    Returns:
        h and c (None without c) after the step.
    """
    batch, hidden = h.shape
    next_h = torch.empty_like(h)
    next_c = None if c is None else torch.empty_like(c)
    configuration.forward.launch(
        -(-batch * hidden // THREADS),
        torch._C._cuda_getCurrentRawStream(configuration.device),
        from_input.data_ptr(),
        from_hidden.data_ptr(),
        *map(_pointer, (b_ih, b_hh, h, c, next_h, next_c)),
        batch,
        hidden,
        int(keep),
    )
    return next_h, next_c


def backward(
    configuration: Configuration,
    kept: Tensor,
    kept_hidden: Tensor | None,
    before: Tensor | None,
    after: Tensor | None,
    dh: Tensor | None,
    dc: Tensor | None,
    need_biases: bool,
) -> Gradients:
    """Make the gates' gradients, and the biases' if they are needed.

    Args:
        configuration: as given to `forward`.
        kept: `from_input` as `forward` left it.
        kept_hidden: `from_hidden` likewise; GRU only.
        before: LSTM: c before the step; GRU: h before it.
        after: LSTM: c after the step; RNN: h after it.
        dh: the gradient of h after the step, contiguous, or None for zeros.
        dc: of c; LSTM only.
        need_biases: whether to make db_ih and db_hh.
    """
    cell = configuration.cell
    batch, columns = kept.shape
    hidden = columns // cell.gates
    has_state = kept_hidden is not None or cell.has_c
    d_input = torch.empty_like(kept)
    d_hidden = d_input if kept_hidden is None else torch.empty_like(kept)
    d_state = kept.new_empty(batch, hidden) if has_state else None
    groups = -(-batch // GROUP_ROWS)
    db_ih = kept.new_empty(columns) if need_biases else None
    db_hh = kept.new_empty(columns) if need_biases else None
    sums = None
    if need_biases and groups > 1:
        sums = kept.new_empty(groups, cell.kept * hidden, dtype=torch.float32)
    stream = torch._C._cuda_getCurrentRawStream(configuration.device)
    configuration.backward.launch(
        -(-hidden // UNITS) * groups,
        stream,
        *map(_pointer, (kept, kept_hidden, before, after, dh, dc, d_input, d_hidden, d_state)),
        *map(_pointer, (sums, db_ih, db_hh)),
        batch,
        hidden,
        groups,
    )
    if sums is not None:
        configuration.add_sums.launch(
            -(-cell.kept * hidden // THREADS),
            stream,
            *map(_pointer, (sums, db_ih, db_hh)),
            hidden,
            groups,
        )
    return Gradients(d_input, d_hidden, d_state, db_ih, db_hh)


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
