"""A stack of layers as a wavefront: each layer a stretch of steps behind the layer below it.

A layer of few hidden units leaves most multiprocessors idle, and a step takes as long whatever else
they do. So each layer has a stream, a lane, for its recurrence, which it runs stretch by stretch,
carrying its state over. A stretch's input product is made on the caller's stream as soon as the
layer below has the stretch, and the recurrence waits for it; backwards likewise, from the top.

All memory is of the caller's stream: made before a lane is told of it, not freed before the
caller's stream waits for the lane. Sequences are full and run in one direction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfai.kernels.rnn import launch
from hfai.kernels.rnn.autograd import Sequences, order_of_input, products_of
from hfai.kernels.rnn.lanes import Carried, Lanes
from hfai.kernels.rnn.launch import Forward, Steps
from hfai.kernels.rnn.plan import Precision
from hfai.kernels.rnn.products import common_width, padded, product
from hfai.kernels.rnn.programs import Configuration
from hfai.kernels.rnn.stretches import cut, diagonals, rows_of


@dataclass(frozen=True)
class Made:
    """What a forward pass of the stack makes; all but y, hn, cn is for backward alone.

    Attributes:
        y: [steps, batch, hidden] of the last layer.
        hn: [layers, batch, hidden].
        cn: likewise, or None.
        inputs: of each layer, [rows, inputs].
        masks: what each layer's input was multiplied by, or None; none for the first.
        gates: of each layer, as `launch.forward` leaves them.
        layers: of each layer, its states and cells.
    """

    y: Tensor
    hn: Tensor
    cn: Tensor | None
    inputs: list[Tensor]
    masks: list[Tensor | None]
    gates: list[Tensor]
    layers: list[Forward]


def forward(
    configuration: Configuration,
    stretches: int,
    steps: Steps,
    has_bias: bool,
    dropout: float,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
    weights: Sequence[Sequence[Tensor]],
    save: bool,
) -> Made:
    """Run all layers over all steps.

    Args:
        configuration: of every layer, one direction.
        stretches: into how many the steps are cut.
        steps: the call's shape, all sequences full.
        has_bias: whether each layer's weights are four and not two.
        dropout: between layers, of this call.
        x: [rows, inputs], contiguous.
        h0: [layers, batch, hidden], contiguous, or None for zeros.
        c0: as h0; LSTM only.
        weights: W_ih, W_hh, b_ih, b_hh of each layer, contiguous.
        save: whether backward will follow.
    """
    plan, tf32 = configuration.plan, configuration.plan.precision == Precision.TF32
    layers, batch, hidden = len(weights), steps.batch, plan.hidden
    columns = plan.cell.gates * hidden
    parts = cut(steps, stretches)
    hn = x.new_empty(layers, batch, hidden)
    cn = torch.empty_like(hn) if plan.cell.has_c else None
    h, c = Carried(hn), Carried(cn)
    words = max(launch.exchange_words(configuration, part) for _, part in parts)
    exchange = torch.full(
        (layers, stretches, words), launch.UNSENT, dtype=torch.int32, device=x.device
    )
    pitch = plan.gate_pitch
    gates = [x.new_empty(1, steps.rows, pitch) for _ in range(layers)]
    made = [launch.room_for(configuration, steps, x, save) for _ in range(layers)]
    inputs, masks = [x], [None] * layers  # type: list[Tensor], list[Tensor | None]
    for layer in range(1, layers):
        below = made[layer - 1].y.view(steps.rows, hidden)
        if dropout:
            masks[layer] = torch.nn.functional.dropout(torch.ones_like(below), dropout, True)
            below = torch.empty_like(below)
        inputs.append(below)
    width = common_width(x, weights[0][0])
    product(
        padded(x, width).whole,
        padded(weights[0][0], width).whole.t(),
        gates[0][0, :, :columns],
        tf32,
    )
    widths = [common_width(inputs[layer], weights[layer][0]) for layer in range(layers)]
    wide = [padded(of[0], width).whole.t() for of, width in zip(weights, widths, strict=True)]
    with Lanes(configuration.device, layers) as lanes:
        for layer, turn in diagonals(layers, stretches):
            (first, part), rows = parts[turn], rows_of(parts[turn], batch)
            if layer:
                lanes.wait_for(layer - 1, turn)
                chunk, mask = inputs[layer][rows], masks[layer]
                if mask is not None:
                    torch.mul(made[layer - 1].y.view_as(mask)[rows], mask[rows], out=chunk)
                chunk = padded(chunk, widths[layer]).whole
                product(chunk, wide[layer], gates[layer][0, rows, :columns], tf32)
            last = turn == stretches - 1
            one, of = made[layer], weights[layer]
            launch.enqueue_forward(
                configuration,
                part,
                gates[layer][:, rows],
                of[1:2],
                [(of[2], of[3])] if has_bias else None,
                _of(h.before(turn, h0), layer),
                _of(c.before(turn, c0), layer),
                Forward(
                    one.y[first : first + part.steps],
                    # Not None: h, unlike c, is every cell's.
                    h.after(turn, last)[layer],  # type: ignore[index]
                    _of(c.after(turn, last), layer),
                    None if one.states is None else one.states[:, first : first + part.steps + 1],
                    None if one.cells is None else one.cells[:, rows],
                ),
                exchange[layer, turn],
                save,
                lanes.ready(layer, waits=layer > 0),
            )
            lanes.did(layer, turn)
    return Made(made[-1].y, hn, cn, inputs, masks, gates, made)


def backward(
    configuration: Configuration,
    stretches: int,
    sequences: Sequences,
    has_bias: bool,
    inputs: Sequence[Tensor],
    masks: Sequence[Tensor | None],
    gates: Sequence[Tensor],
    cells: Sequence[Tensor | None],
    states: Sequence[Tensor],
    c0: Tensor | None,
    weights: Sequence[Sequence[Tensor]],
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    needed: Sequence[Sequence[bool]],
) -> tuple[Tensor | None, Tensor, Tensor | None, list[Tensor | None]]:
    """Run all layers backwards.

    Args:
        configuration: as given to `forward`, like all that is not said here.
        stretches: into how many the steps are cut.
        sequences: those of `steps`.
        has_bias: whether each layer's weights are four and not two.
        inputs: as `forward` left it, likewise `masks` and `gates`.
        masks: of the layers' inputs.
        gates: of each layer.
        cells: of each layer, as `forward` left it.
        states: of each layer, as `forward` left it.
        c0: before all steps.
        weights: of each layer.
        gradients: of y, hn and cn, contiguous, or None for zeros.
        needed: of each layer, of its input and of each weight.

    Returns:
        The gradients of x (None where not needed), h0 and c0, and those of all weights, by layer.
    """
    plan, tf32 = configuration.plan, configuration.plan.precision == Precision.TF32
    steps, layers, hidden = sequences.steps, len(weights), plan.hidden
    batch, like = steps.batch, inputs[0]
    columns = plan.cell.gates * hidden
    parts = cut(steps, stretches)
    dy, dhn, dcn = gradients
    dh0 = like.new_empty(layers, batch, hidden)
    dc0 = torch.empty_like(dh0) if plan.cell.has_c else None
    h, c = Carried(dh0), Carried(dc0)
    floats = launch.mailbox_floats(configuration, batch)
    mailbox = torch.zeros(layers, stretches, floats, dtype=torch.float32, device=like.device)
    back = [
        padded(order_of_input(plan.cell, of[0]), common_width(of[0])).whole if layer else of[0]
        for layer, of in enumerate(weights)
    ]
    dys: list[Tensor | None] = [like.new_empty(steps.rows, hidden) for _ in range(layers - 1)]
    dys.append(None if dy is None else dy.view(steps.rows, hidden))
    dgates: list[Tensor] = [like] * layers
    found: list[list[Tensor | None]] = [[] for _ in range(layers)]

    def finish(layer: int) -> None:
        """Make the products of a layer whose stretches the caller's stream has waited for."""
        found[layer] = products_of(
            configuration,
            sequences,
            has_bias,
            inputs[layer],
            dgates[layer],
            states[layer],
            weights[layer],
            (needed[layer][0] and not layer, *needed[layer][1:]),
        )
        dgates[layer] = like

    with Lanes(configuration.device, layers) as lanes:
        for height, since in diagonals(layers, stretches):
            layer, turn = layers - 1 - height, stretches - 1 - since
            (first, part), rows = parts[turn], rows_of(parts[turn], batch)
            if not since:
                dgates[layer] = torch.empty_like(gates[layer])
            output, kept, mask = dys[layer], cells[layer], None
            if height:
                assert output is not None
                lanes.wait_for(layer + 1, turn)
                above = dgates[layer + 1][0, rows, :columns]
                _product_into(above, back[layer + 1], output[rows], tf32)
                mask = masks[layer + 1]
                if mask is not None:
                    output[rows].mul_(mask[rows])
            c_before = _of(c0, layer)
            if turn and kept is not None:
                c_before = kept[:, (first - 1) * batch : first * batch]
            launch.enqueue_backward(
                configuration,
                part,
                (
                    gates[layer][:, rows],
                    None if kept is None else kept[:, rows],
                    states[layer][:, first : first + part.steps + 1],
                    c_before,
                ),
                weights[layer][1:2],
                (
                    None if output is None else output[rows],
                    _of(h.before(since, dhn), layer),
                    _of(c.before(since, dcn), layer),
                ),
                (
                    dgates[layer][:, rows],
                    # Not None, as in forward.
                    h.after(since, not turn)[layer],  # type: ignore[index]
                    _of(c.after(since, not turn), layer),
                ),
                mailbox[layer, turn],
                lanes.ready(layer, waits=height > 0 or not since),
            )
            lanes.did(layer, turn)
            if height and not turn:
                finish(layer + 1)
        lanes.wait_for(0, 0)
        finish(0)
    return found[0][0], dh0, dc0, [one for of in found for one in of[1:]]


def _product_into(a: Tensor, b: Tensor, out: Tensor, tf32: bool) -> None:
    if b.shape[1] == out.shape[1]:
        product(a, b, out, tf32)
        return
    room = out.new_empty(out.shape[0], b.shape[1])
    product(a, b, room, tf32)
    out.copy_(room[:, : out.shape[1]])


def _of(states: Tensor | None, layer: int) -> Tensor | None:
    return None if states is None else states[layer]
