"""The autograd node of one recurrent layer, both directions at once.

Forward is one product for the inputs of all steps and one launch; backward is one launch and three
products a direction. Written in the ctx style and entered below `Function.apply`'s Python wrapper,
as all operators here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hfai.kernels.cooperative import RefusedError
from hfai.kernels.coverage import dense, why_not_plain, why_watched
from hfai.kernels.rnn import formula, launch
from hfai.kernels.rnn.launch import Steps
from hfai.kernels.rnn.plan import Cell, Precision
from hfai.kernels.rnn.products import (
    column_sums,
    common_width,
    dense_product,
    padded,
    product,
    taken_as_they_lie,
)
from hfai.kernels.rnn.programs import Configuration, refused
from hfai.kernels.watched import Sources, gradients_by_formula


@dataclass(frozen=True)
class Sequences:
    """How a batch of sequences lies in the input: `Steps` for the kernels, sizes for the host.

    `batch_sizes` is None where all sequences have all steps. `rows_of_steps` [rows], int64, then
    says nothing; with packed sequences it is the index, step-major and padded, of each packed row.
    """

    steps: Steps
    batch_sizes: tuple[int, ...] | None = None
    rows_of_steps: Tensor | None = None


class Layer(Function):
    """y, hn, cn = layer(x, h0, c0; weights), and its gradients by our kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        configuration: Configuration,
        sequences: Sequences,
        has_bias: bool,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the layer and save the gates, the cells' states and h."""
        made, gates = run(configuration, sequences, x, h0, c0, has_bias, weights, True)
        saved = (x, h0, c0, gates, made.cells, made.states, *weights)
        ctx.save_for_backward(*saved)
        ctx.shapes = tuple(None if tensor is None else tensor.shape for tensor in saved)
        ctx.constants = (configuration, sequences, has_bias)
        ctx.set_materialize_grads(False)
        return (made.y, made.hn) if made.cn is None else (made.y, made.hn, made.cn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the layer backwards, by torch's own operators where this pass is itself watched."""
        saved = ctx.saved_tensors
        configuration, sequences, has_bias = ctx.constants
        needed = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[6:])
        found = None
        if not torch.is_grad_enabled() and why_watched() is None:
            constants = (*ctx.constants, ctx.shapes)
            found = _by_kernels(constants, saved, gradients, needed)
        if found is None:
            inputs = (*saved[:3], *saved[6:])
            found = _watched_backward(configuration, sequences, has_bias, inputs, gradients, needed)
        return (*found[:3], None, None, None, *found[3:])


def are_as_saved(
    configuration: Configuration,
    shapes: tuple[Any, ...],
    saved: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
) -> bool:
    """Return whether the kernels can read these tensors.

    Hooks may have brought saved tensors back as something else, and gradients may be batched.
    """
    return shapes == tuple(None if tensor is None else tensor.shape for tensor in saved) and all(
        tensor is None
        or (
            why_not_plain(tensor) is None
            and tensor.dtype is configuration.dtype
            and tensor.get_device() == configuration.device
        )
        for tensor in (*saved, *gradients)
    )


def _by_kernels(
    constants: tuple[Any, ...],
    saved: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None] | None:
    """Return the gradients, or None where it is not for the kernels to make them."""
    configuration, sequences, has_bias, shapes = constants
    if not are_as_saved(configuration, shapes, saved, gradients):
        return None
    x, _, c0, gates, cells, states, *weights = [
        None if tensor is None else dense(tensor) for tensor in saved
    ]
    try:
        return _backward(
            configuration,
            sequences,
            has_bias,
            (x, c0, gates, cells, states),
            weights,
            gradients,
            needed,
        )
    except RefusedError as error:
        refused[configuration] = str(error)
        return None


# `Layer.apply` without the Python wrapper around it.
apply_layer: Callable[..., tuple[Tensor, ...]] = super(Function, Layer).apply


def run(
    configuration: Configuration,
    sequences: Sequences,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    has_bias: bool,
    weights: tuple[Tensor, ...],
    save: bool,
) -> tuple[launch.Forward, Tensor]:
    """Run one layer forward.

    Args:
        configuration: what fits these tensors.
        sequences: how they lie in x.
        x: [rows, inputs], contiguous.
        h0: [directions, batch, hidden], contiguous, or None.
        c0: as h0.
        has_bias: whether each direction's weights are four and not two.
        weights: W_ih, W_hh, b_ih, b_hh of each direction, contiguous.
        save: whether backward will follow.

    Returns:
        What `launch.forward` makes, and the gates' buffer as it left it.
    """
    plan, tf32 = configuration.plan, configuration.plan.precision == Precision.TF32
    each = _by_direction(weights, has_bias)
    gates = x.new_empty(plan.directions, sequences.steps.rows, plan.gate_pitch)
    columns = plan.cell.gates * plan.hidden
    width = common_width(x, *(w_ih for w_ih, *_ in each))
    if taken_as_they_lie(x.shape[0], x.shape[1], columns, x, tf32):
        width = x.shape[1]
    inputs = padded(x, width).whole
    for of_direction, (w_ih, *_) in zip(gates, each, strict=True):
        product(inputs, padded(w_ih, width).whole.t(), of_direction[:, :columns], tf32)
    del inputs
    made = launch.forward(
        configuration,
        sequences.steps,
        gates,
        [w_hh for _, w_hh, *_ in each],
        [(b_ih, b_hh) for _, _, b_ih, b_hh in each] if has_bias else None,
        h0,
        c0,
        save,
    )
    return made, gates


def _by_direction(weights: Any, has_bias: bool) -> list[tuple[Tensor, ...]]:
    count = 4 if has_bias else 2
    return [tuple(weights[i : i + count]) for i in range(0, len(weights), count)]


def _backward(
    configuration: Configuration,
    sequences: Sequences,
    has_bias: bool,
    saved: tuple[Any, ...],
    weights: Sequence[Any],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    x, c0, gates, cells, states = saved
    dy, dhn, dcn = (
        None if gradient is None else dense(gradient) for gradient in (*gradients, None, None)[:3]
    )
    each = _by_direction(weights, has_bias)
    dgates, dh0, dc0 = launch.backward(
        configuration,
        sequences.steps,
        gates,
        cells,
        states,
        [w_hh for _, w_hh, *_ in each],
        c0,
        dy,
        dhn,
        dcn,
    )
    found = products_of(
        configuration, sequences, has_bias, x, dgates, states, weights, (needed[0], *needed[3:])
    )
    found[1:1] = [dh0 if needed[1] else None, dc0 if needed[2] else None]
    return found


def products_of(
    configuration: Configuration,
    sequences: Sequences,
    has_bias: bool,
    x: Tensor,
    dgates: Tensor,
    states: Tensor,
    weights: Sequence[Tensor],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """Return the gradients of x and of the weights, those that are needed of them.

    Args:
        configuration: the layer's.
        sequences: how they lie in x.
        has_bias: whether each direction's weights are four and not two.
        x: [rows, inputs], contiguous.
        dgates: as `launch.backward` returned it.
        states: as `launch.forward` returned it.
        weights: as given to `run`.
        needed: of x and of each of the weights.
    """
    plan, tf32 = configuration.plan, configuration.plan.precision == Precision.TF32
    count, steps = 4 if has_bias else 2, sequences.steps.steps
    columns = plan.cell.gates * plan.hidden
    found: list[Tensor | None] = [None]
    each = _by_direction(weights, has_bias)
    for direction, (w_ih, *_) in enumerate(each):
        need = needed[1 + direction * count : 1 + (direction + 1) * count]
        all_gates = dgates[direction]
        # GRU's four are dn, dr, dz, dq: dn belongs to the input, dq to h.
        shift = plan.hidden if plan.cell is Cell.GRU else 0
        of_input, of_hidden = all_gates[:, :columns], all_gates[:, shift : shift + columns]
        # What a step leaves is all that stays: these matrices are a large part of peak memory.
        if needed[0]:
            to_input = order_of_input(plan.cell, w_ih)
            part = dense_product(of_input, to_input, x.shape[1], tf32)
            found[0] = part if found[0] is None else found[0].add_(part)
            del to_input, part
        dw_ih = dw_hh = sums = None
        # Elsewhere they come with the product for dW_ih, in its precision.
        by_themselves = shift or not need[0] or plan.precision == Precision.SPLIT
        if has_bias and (need[2] or need[3]) and by_themselves:
            sums = column_sums(all_gates[:, : columns + shift])
        if need[0]:
            dw_ih, beside = _of_weight(of_input, x, tf32, has_bias and sums is None)
            sums = beside if sums is None else sums
            dw_ih = _in_order_of_weight(plan.cell, dw_ih)
        if need[1]:
            before = states[direction, 1:] if direction else states[direction, :steps]
            before = before.reshape(-1, plan.width)
            if sequences.rows_of_steps is not None:
                before = before[sequences.rows_of_steps]
            dw_hh = dense_product(of_hidden.t(), before, plan.hidden, tf32)
            del before
        found += [dw_ih, dw_hh]
        if has_bias:
            db_ih = db_hh = None
            if need[2] or need[3]:
                sums = column_sums(of_input) if sums is None else sums
                db_ih = _in_order_of_weight(plan.cell, sums[:columns])
                # Memory of its own: whoever accumulates into one must not change the other.
                db_hh = sums[shift:].clone()
            found += [db_ih if need[2] else None, db_hh if need[3] else None]
    return found


def _of_weight(
    of_input: Tensor, x: Tensor, tf32: bool, with_sums: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of W_ih and, where it costs nothing, the sums of the gates' gradients.

    Args:
        of_input: the gates' gradients [rows, columns].
        x: [rows, inputs].
        tf32: whether fp32 operands may be rounded to TF32.
        with_sums: whether the sums over rows are wanted.
    """
    inputs = x.shape[1]
    if taken_as_they_lie(of_input.shape[1], x.shape[0], inputs, x, tf32):
        return dense_product(of_input.t(), x, inputs, tf32), None
    right = padded(x, common_width(x, ones=with_sums), ones=with_sums)
    wide = x.new_empty(of_input.shape[1], right.whole.shape[1])
    product(of_input.t(), right.whole, wide, tf32)
    sums = None if right.ones is None else wide[:, right.ones].contiguous()
    return wide[:, :inputs].contiguous(), sums


def order_of_input(cell: Cell, weight: Tensor) -> Tensor:
    """Return W_ih with its rows in the order in which backward.cu leaves the input's gradients."""
    if cell is not Cell.GRU:
        return weight
    reset, update, new = weight.chunk(3)
    return torch.cat([new, reset, update])


def _in_order_of_weight(cell: Cell, gradient: Tensor) -> Tensor:
    """Undo `order_of_input`."""
    if cell is not Cell.GRU:
        return gradient
    new, reset, update = gradient.chunk(3)
    return torch.cat([reset, update, new])


def _watched_backward(
    configuration: Configuration,
    sequences: Sequences,
    has_bias: bool,
    inputs: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The same gradients through torch's operators: double backward, vmap over gradients."""
    steps = sequences.steps
    sizes = sequences.batch_sizes or (steps.batch,) * steps.steps

    def outputs(sources: Sources) -> tuple[Tensor | None, ...]:
        x, h0, c0, *weights = sources
        each: list[Any] = [
            tuple(part) if has_bias else (*part, None, None)
            for part in _by_direction(weights, has_bias)
        ]
        assert x is not None
        return formula.layer(configuration.plan.cell, x, sizes, each, h0, c0)

    return gradients_by_formula(outputs, inputs, gradients, needed)
