"""The differentiable step of a cell, and its autograd node.

There are two that do the same work with the same kernels: the one written here, and node.cpp,
which takes over as soon as it is compiled (`attach`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.cuda import current_device

from hfai.kernels.cell import launch, programs
from hfai.kernels.cell.programs import Configuration
from hfai.kernels.coverage import dense, why_not_plain, why_watched
from hfai.kernels.extension import Extension
from hfai.kernels.rnn import formula
from hfai.kernels.watched import Sources, gradients_by_formula

Operands = Sequence["Tensor | None"]
"""x, h, c, w_ih, w_hh, b_ih, b_hh; c is None but for LSTM, the biases are both there or neither."""


class Step(Function):
    """h and c after one step, and the gradients, by torch's products and our kernels."""

    @staticmethod
    def forward(ctx: Any, configuration: Configuration, *operands: Tensor | None) -> Any:
        """Run the step; keep the activations in the place of the products."""
        outputs, from_input, from_hidden = _run(configuration, operands, keep=True)
        cell = configuration.cell
        is_gru = cell.gates == 3
        # What backward needs beside the operands: LSTM c after the step, RNN h after it.
        after = None if is_gru else outputs[-1]
        ctx.save_for_backward(*operands, from_input, from_hidden if is_gru else None, after)
        ctx.configuration = configuration
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the kernels and products, or torch's own where this pass is itself watched."""
        *operands, kept, kept_hidden, after = ctx.saved_tensors
        configuration = ctx.configuration
        needed = ctx.needs_input_grad[1:]
        dh, dc = (*gradients, None)[:2]
        given = [t for t in (dh, dc, *operands, kept, kept_hidden, after) if t is not None]
        if (
            torch.is_grad_enabled()
            or why_watched()
            or any(why_not_plain(tensor) for tensor in given)
            or not fits(configuration, *operands)
        ):
            found = watched_backward(configuration, dh, dc, *operands, *needed)
        elif torch.is_autocast_enabled("cuda"):
            with torch.autocast("cuda", enabled=False):
                found = _backward(configuration, dh, dc, operands, kept, kept_hidden, after, needed)
        else:
            found = _backward(configuration, dh, dc, operands, kept, kept_hidden, after, needed)
        return (None, *found)


# `Step.apply` without the Python wrapper around it.
apply_step: Callable[..., tuple[Tensor, ...]] = super(Function, Step).apply

EXTENSION = Extension("cell/node.cpp", "cell_node")


def attach(configuration: Configuration) -> None:
    """Give a configuration its `run`: from Python at once, from node.cpp when that is there."""
    configuration.run = functools.partial(run, configuration)
    # Now and not in the extension's thread: a kernel is loaded when no graph is being captured.
    kernels = (configuration.forward, configuration.backward, configuration.add_sums)
    descriptions = tuple(kernel.description for kernel in kernels)

    def take_over(module: ModuleType) -> None:
        call = node_call(module, configuration, descriptions)
        configuration.run = functools.partial(module.step, call)

    EXTENSION.request(take_over)


def node_call(
    module: ModuleType, configuration: Configuration, descriptions: tuple[tuple[int, ...], ...]
) -> object:
    """Return what node.cpp's `step` takes for calls of this configuration."""
    cell = configuration.cell
    return module.make_call(
        configuration,
        watched_backward,
        configuration.device,
        cell.gates,
        cell.kept,
        cell.has_c,
        configuration.dtype,
        (programs.UNITS, programs.GROUP_ROWS, programs.THREADS),
        *descriptions,
    )


def run(configuration: Configuration, *operands: Tensor | None) -> tuple[Tensor, ...] | None:
    """Make one step, differentiably where that is called for; None where a tensor does not fit.

    The tensors' types, x's device and its dtype are the configuration's.
    """
    if not fits(configuration, *operands):
        return None
    if configuration.device != current_device():
        with torch.cuda.device(configuration.device):
            return _choose(configuration, operands)
    return _choose(configuration, operands)


def _choose(configuration: Configuration, operands: Operands) -> tuple[Tensor, ...]:
    operands = [None if tensor is None else dense(tensor) for tensor in operands]
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in operands):
        return apply_step(configuration, *operands)
    return _run(configuration, operands, keep=False)[0]


def fits(
    configuration: Configuration,
    x: Tensor | None,
    h: Tensor | None,
    c: Tensor | None,
    w_ih: Tensor | None,
    w_hh: Tensor | None,
    b_ih: Tensor | None,
    b_hh: Tensor | None,
) -> bool:
    """Return whether shapes, types and devices are what the kernels take (node.cpp asks the same).

    A bias for one product alone is no such thing.
    """
    if x is None or h is None or w_ih is None or w_hh is None:
        return False
    given = [t for t in (x, h, c, w_ih, w_hh, b_ih, b_hh) if t is not None]
    if any(tensor.is_nested or tensor.layout is not torch.strided for tensor in given):
        return False
    if x.dim() != 2 or h.dim() != 2 or 0 in (*x.shape, *h.shape):
        return False
    (batch, inputs), hidden = x.shape, h.shape[1]
    rows = configuration.cell.gates * hidden
    wanted: list[tuple[Tensor, tuple[int, ...]]] = [
        (x, (batch, inputs)),
        (h, (batch, hidden)),
        (w_ih, (rows, inputs)),
        (w_hh, (rows, hidden)),
    ]
    if (c is not None) != configuration.cell.has_c or (b_ih is None) != (b_hh is None):
        return False
    wanted += [(c, (batch, hidden))] if c is not None else []
    wanted += [(b, (rows,)) for b in (b_ih, b_hh) if b is not None]
    return all(
        tensor.shape == shape
        and tensor.dtype is configuration.dtype
        and tensor.get_device() == configuration.device
        for tensor, shape in wanted
    )


def _run(
    configuration: Configuration, operands: Operands, *, keep: bool
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Return h and, if there is one, c after the step, and both products' buffers."""
    x, h, c, w_ih, w_hh, b_ih, b_hh = operands
    assert x is not None
    assert h is not None
    assert w_ih is not None
    assert w_hh is not None
    from_input = torch.mm(x, w_ih.t())
    from_hidden = torch.mm(h, w_hh.t())
    made = launch.forward(configuration, from_input, from_hidden, b_ih, b_hh, h, c, keep)
    next_h, next_c = made
    return (next_h,) if next_c is None else (next_h, next_c), from_input, from_hidden


def _backward(
    configuration: Configuration,
    dh: Tensor | None,
    dc: Tensor | None,
    operands: Operands,
    kept: Tensor,
    kept_hidden: Tensor | None,
    after: Tensor | None,
    needed: Sequence[bool],
) -> list[Tensor | None]:
    x, h, c, w_ih, w_hh = (None if t is None else dense(t) for t in operands[:5])
    assert x is not None
    assert h is not None
    assert w_ih is not None
    assert w_hh is not None
    need_x, need_h, need_c, need_w_ih, need_w_hh, need_b_ih, need_b_hh = needed
    made = launch.backward(
        configuration,
        dense(kept),
        None if kept_hidden is None else dense(kept_hidden),
        c if configuration.cell.has_c else h,
        None if after is None else dense(after),
        None if dh is None else dense(dh),
        None if dc is None else dense(dc),
        need_b_ih or need_b_hh,
    )
    dx = torch.mm(made.d_input, w_ih) if need_x else None
    dh_before = None
    if need_h and made.d_state is not None and not configuration.cell.has_c:
        dh_before = torch.addmm(made.d_state, made.d_hidden, w_hh)
    elif need_h:
        dh_before = torch.mm(made.d_hidden, w_hh)
    return [
        dx,
        dh_before,
        made.d_state if need_c else None,
        torch.mm(made.d_input.t(), x) if need_w_ih else None,
        torch.mm(made.d_hidden.t(), h) if need_w_hh else None,
        made.db_ih if need_b_ih else None,
        made.db_hh if need_b_hh else None,
    ]


def watched_backward(
    configuration: Configuration,
    dh: Tensor | None,
    dc: Tensor | None,
    *operands_and_needed: Any,
) -> list[Tensor | None]:
    """The same gradients through torch's operators: double backward, vmap over gradients.

    Args:
        configuration: of the step.
        dh: the gradient of h after the step, or None.
        dc: of c.
        operands_and_needed: the seven operands, then for each whether it needs a gradient.
    """
    operands, needed = operands_and_needed[:7], operands_and_needed[7:]

    def outputs(sources: Sources) -> tuple[Tensor | None, ...]:
        # x, h and the weights among them are never None.
        return formula.step(configuration.cell, *sources)  # type: ignore[arg-type]

    return gradients_by_formula(outputs, operands, (dh, dc), needed)
