"""The autograd node of a whole stack of layers that runs as a wavefront (`wavefront`).

One node and not one a layer: the layers' stretches interleave, and so must their backward passes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from hfai.kernels.coverage import dense, why_watched
from hfai.kernels.rnn import formula, wavefront
from hfai.kernels.rnn.autograd import Sequences, are_as_saved
from hfai.kernels.rnn.programs import Configuration
from hfai.kernels.watched import Sources, gradients_by_formula


class Layers(Function):
    """y, hn, cn = layers(x, h0, c0; weights), and its gradients by our kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        h0: Tensor | None,
        c0: Tensor | None,
        configuration: Configuration,
        sequences: Sequences,
        stretches: int,
        has_bias: bool,
        dropout: float,
        *weights: Tensor,
    ) -> tuple[Tensor, ...]:
        """Run the layers and save each one's input, gates, cells' states and h."""
        by_layer = _by_layer(weights, has_bias)
        made = wavefront.forward(
            configuration, stretches, sequences.steps, has_bias, dropout, x, h0, c0, by_layer, True
        )
        states = [layer.states for layer in made.layers]
        cells = [layer.cells for layer in made.layers]
        saved = (h0, c0, *made.inputs, *made.masks, *made.gates, *cells, *states, *weights)
        ctx.save_for_backward(*saved)
        ctx.shapes = tuple(None if tensor is None else tensor.shape for tensor in saved)
        ctx.constants = (configuration, sequences, stretches, has_bias)
        ctx.layers = len(by_layer)
        ctx.set_materialize_grads(False)
        return (made.y, made.hn) if made.cn is None else (made.y, made.hn, made.cn)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Run the layers backwards, by torch's operators where this pass is itself watched."""
        saved = ctx.saved_tensors
        configuration, sequences, stretches, has_bias = ctx.constants
        layers = ctx.layers
        h0, c0 = saved[:2]
        inputs, masks, gates, cells, states = (
            saved[2 + i * layers : 2 + (i + 1) * layers] for i in range(5)
        )
        weights = saved[2 + 5 * layers :]
        # As x, h0, c0 and the weights were given, without the five that are no tensors.
        needed = (*ctx.needs_input_grad[:3], *ctx.needs_input_grad[8:])
        if (
            torch.is_grad_enabled()
            or why_watched() is not None
            or not are_as_saved(configuration, ctx.shapes, saved, gradients)
        ):
            sources = (inputs[0], h0, c0, *weights)
            found = _watched_backward(
                configuration, sequences, has_bias, masks, sources, gradients, needed
            )
            return (*found[:3], None, None, None, None, None, *found[3:])
        of_weights = _by_layer(needed[3:], has_bias)
        dy, dhn, dcn = (
            None if gradient is None else dense(gradient) for gradient in (*gradients, None)[:3]
        )
        dx, dh0, dc0, dweights = wavefront.backward(
            configuration,
            stretches,
            sequences,
            has_bias,
            [dense(tensor) for tensor in inputs],
            [None if tensor is None else dense(tensor) for tensor in masks],
            [dense(tensor) for tensor in gates],
            [None if tensor is None else dense(tensor) for tensor in cells],
            [dense(tensor) for tensor in states],
            None if c0 is None else dense(c0),
            _by_layer([dense(weight) for weight in weights], has_bias),
            (dy, dhn, dcn),
            [(needed[0], *of) for of in of_weights],
        )
        of_states = (dh0 if needed[1] else None, dc0 if needed[2] else None)
        return (dx, *of_states, None, None, None, None, None, *dweights)


# `Layers.apply` without the Python wrapper around it.
apply_layers: Callable[..., tuple[Tensor, ...]] = super(Function, Layers).apply


def _by_layer(weights: Sequence[Any], has_bias: bool) -> list[tuple[Any, ...]]:
    count = 4 if has_bias else 2
    return [tuple(weights[i : i + count]) for i in range(0, len(weights), count)]


def _watched_backward(
    configuration: Configuration,
    sequences: Sequences,
    has_bias: bool,
    masks: Sequence[Tensor | None],
    sources: tuple[Tensor | None, ...],
    gradients: tuple[Tensor | None, ...],
    needed: tuple[bool, ...],
) -> list[Tensor | None]:
    """The same gradients through torch's operators: double backward, vmap over gradients."""
    cell, steps = configuration.plan.cell, sequences.steps
    sizes = (steps.batch,) * steps.steps

    def outputs(sources: Sources) -> tuple[Tensor | None, ...]:
        x, h0, c0, *weights = sources
        assert x is not None
        hn, cn = [], []
        for layer, of in enumerate(_by_layer(weights, has_bias)):
            mask = masks[layer]
            if mask is not None:
                x = x * mask
            begins = [None if state is None else state[layer : layer + 1] for state in (h0, c0)]
            one = of if has_bias else (*of, None, None)
            x, h, c = formula.layer(cell, x, sizes, [one], *begins)
            hn.append(h)
            cn.append(c)
        # cn holds tensors alone where the cell has c.
        return x, torch.cat(hn), torch.cat(cn) if cell.has_c else None  # type: ignore[arg-type]

    return gradients_by_formula(outputs, sources, gradients, needed)
