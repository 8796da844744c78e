"""Which recurrent layers the kernels cover, and how a stack of layers is run.

`why_not_configured` answers from types, shapes and the device alone, and `configure` keeps what it
found; nothing here looks at the data.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.cuda import current_device

from hfai.kernels import jit
from hfai.kernels.cooperative import RefusedError
from hfai.kernels.coverage import PLAIN_TYPES, dense, why_not_plain
from hfai.kernels.rnn import cluster_dispatch, dispatch, status, stretches, wavefront
from hfai.kernels.rnn.autograd import Sequences, apply_layer, run
from hfai.kernels.rnn.plan import Cell, Precision
from hfai.kernels.rnn.programs import Configuration, refused
from hfai.kernels.rnn.stack import apply_layers

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MOST_HIDDEN = 1 << 16
MOST_BATCH = 1 << 16


@dataclass(frozen=True)
class Stack:
    """A module's layers as they are at this moment.

    `weights[layer]` holds W_ih, W_hh, and with biases b_ih, b_hh, of each direction in turn.
    """

    cell: Cell
    hidden: int
    directions: int
    has_bias: bool
    weights: tuple[tuple[Tensor, ...], ...]
    dropout: float
    """Between layers, in this call: 0 in evaluation."""

    def to(self, dtype: torch.dtype) -> Stack:
        """Return the same layers with their weights cast, differentiably."""
        weights = tuple(tuple(w.to(dtype) for w in layer) for layer in self.weights)
        return replace(self, weights=weights)


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is where the kernels are."""
    return tensor.is_cuda


# The getter behind torch.backends.cudnn.rnn.fp32_precision (torch 2.9 and later), which costs a
# tenth of the property.
_fp32_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def allows_tf32() -> bool:
    """Return whether torch's switches let fp32 recurrences run in TF32."""
    if _fp32_precision is not None:
        return bool(_fp32_precision("cuda", "rnn") == "tf32")
    return bool(torch.backends.cudnn.allow_tf32)


def uses_cudnn() -> bool:
    """Return whether torch's own recurrences run in cuDNN (`torch.backends.cudnn.enabled`)."""
    return bool(torch._C._get_cudnn_enabled())


def precision_of(dtype: torch.dtype) -> Precision:
    """Return how products of this type are made under torch's switches as they are now."""
    if dtype != torch.float32:
        return Precision.HALF
    return Precision.TF32 if allows_tf32() else Precision.SPLIT


def why_not_covered(stack: Stack, like: Tensor) -> str | None:
    """Say what of the layers' types, shapes and devices is not covered, or None.

    Args:
        stack: the layers.
        like: a tensor whose type, dtype and device are the input's.
    """
    reason = why_not_plain(like)
    if reason is not None:
        return reason
    if like.dtype not in DTYPES:
        return f"{like.dtype} is not among fp32, fp16 and bf16"
    rows = stack.cell.gates * stack.hidden
    for layer, weights in enumerate(stack.weights):
        for i, weight in enumerate(weights):
            if type(weight) not in PLAIN_TYPES:
                return f"a parameter is a {type(weight).__name__}, a tensor subclass"
            if weight.device != like.device:
                return f"a parameter is on {weight.device} and the input on {like.device}"
            if weight.dtype != like.dtype:
                return f"a parameter is {weight.dtype} and the input {like.dtype}"
            kind = i % (4 if stack.has_bias else 2)
            wanted = {1: (rows, stack.hidden), 2: (rows,), 3: (rows,)}.get(kind)
            if wanted is None:
                wanted = (rows, weight.shape[-1] if not layer else stack.directions * stack.hidden)
            if tuple(weight.shape) != wanted:
                return f"a parameter has shape {tuple(weight.shape)}, not {wanted}"
    return jit.why_unavailable(like.get_device())


def why_not_configured(
    stack: Stack, device: int, dtype: torch.dtype, batch: int, steps: int
) -> str | None:
    """Say why a call of this size is torch's, or None where `configure` has a configuration."""
    found = _look_up(stack, device, dtype, batch, steps)
    return found if isinstance(found, str) else None


def configure(
    stack: Stack, device: int, dtype: torch.dtype, batch: int, steps: int
) -> Configuration | None:
    """Return what a call of this size runs with, or None where it is torch's."""
    found = _look_up(stack, device, dtype, batch, steps)
    return None if isinstance(found, str) else found


def largest_batch(stack: Stack, device: int, dtype: torch.dtype) -> int:
    """Return the largest batch, a power of two, up to which long sequences are ours."""
    batch = 1
    while (
        batch < MOST_BATCH
        and why_not_configured(stack, device, dtype, 2 * batch, dispatch.FEWEST_STEPS) is None
    ):
        batch *= 2
    return batch


def _look_up(
    stack: Stack, device: int, dtype: torch.dtype, batch: int, steps: int
) -> Configuration | str:
    if dtype is torch.float32 and not uses_cudnn():
        # Ours would follow the switch for recurrence, TF32 by default, where torch's has fp32.
        return "cuDNN is switched off: torch's fp32 then follows its switch for matrix products"
    found = _found(
        stack.cell,
        stack.hidden,
        stack.directions,
        batch,
        min(steps, dispatch.FEWEST_STEPS),
        device,
        dtype,
        precision_of(dtype),
    )
    return found if isinstance(found, str) else refused.get(found, found)


@functools.cache
def _found(
    cell: Cell,
    hidden: int,
    directions: int,
    batch: int,
    steps: int,
    device: int,
    dtype: torch.dtype,
    precision: Precision,
) -> Configuration | str:
    if not 0 < hidden <= MOST_HIDDEN:
        return f"a hidden size of {hidden}"
    limits = jit.device_limits(device)
    clusters = cluster_dispatch.choose_where_faster(
        cell, hidden, directions, batch, dtype, precision, limits
    )
    if clusters is not None and steps >= dispatch.FEWEST_STEPS:
        return _configuration(device, dtype, clusters)
    plan = dispatch.choose(cell, hidden, directions, batch, precision, limits)
    if plan is None:
        return f"the weights of {hidden} hidden units do not stay on the chip"
    reason = dispatch.why_left_to_torch(plan, dtype, batch, steps, limits)
    return _configuration(device, dtype, plan) if reason is None else reason


# Batches of several sizes share a plan, and so its compiled programs.
_configuration = functools.cache(Configuration)


def run_stack(
    configuration: Configuration,
    stack: Stack,
    sequences: Sequences,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run all layers, differentiably where gradients are asked for.

    Args:
        configuration: of every layer.
        stack: the layers.
        sequences: how they lie in x.
        x: [rows, inputs].
        h0: [layers * directions, batch, hidden], or None for zeros.
        c0: as h0; LSTM only.

    Returns:
        y of the last layer, [steps, batch, directions * hidden], or of packed sequences [rows,
        directions * hidden]; hn and cn as h0, cn None without c.

    Raises:
        RefusedError: the device has no room for all blocks at once; this is remembered.
        RuntimeError: a launch failed, or an earlier one on this device gave up (`status`).
    """
    if configuration.device != current_device():
        with torch.cuda.device(configuration.device):
            return run_stack(configuration, stack, sequences, x, h0, c0)
    status.raise_if_lost(configuration.device)
    count = stretches.stretch_count(configuration, len(stack.weights), sequences)
    if count > 1:
        return _run_wavefront(configuration, count, stack, sequences, x, h0, c0)
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer, weights in enumerate(stack.weights):
        if layer and stack.dropout:
            x = torch.nn.functional.dropout(x, stack.dropout, training=True)
        part = slice(layer * stack.directions, (layer + 1) * stack.directions)
        states = [None if state is None else dense(state[part]) for state in (h0, c0)]
        try:
            made = _run_layer(configuration, stack, sequences, dense(x), states, weights)
        except RefusedError as error:
            refused[configuration] = str(error)
            raise
        x = y = made[0]
        x = x.view(sequences.steps.rows, -1)
        last_h.append(made[1])
        last_c += made[2:]
    hn = last_h[0] if len(last_h) == 1 else torch.cat(last_h)
    if not last_c:
        return y, hn, None
    return y, hn, last_c[0] if len(last_c) == 1 else torch.cat(last_c)


def _run_wavefront(
    configuration: Configuration,
    count: int,
    stack: Stack,
    sequences: Sequences,
    x: Tensor,
    h0: Tensor | None,
    c0: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    weights = [dense(weight) for layer in stack.weights for weight in layer]
    x = dense(x)
    h0, c0 = (None if state is None else dense(state) for state in (h0, c0))
    try:
        if _is_watched(x, h0, c0, *weights):
            reason = configuration.refuses()
            if reason is not None:
                raise RefusedError(reason)
            made = apply_layers(
                x,
                h0,
                c0,
                configuration,
                sequences,
                count,
                stack.has_bias,
                stack.dropout,
                *weights,
            )
            # mypy does not follow the length: LSTM alone has cn.
            return made if len(made) == 3 else (*made, None)  # type: ignore[return-value]
        of_layer = len(stack.weights[0])
        by_layer = [weights[i : i + of_layer] for i in range(0, len(weights), of_layer)]
        all_of_it = wavefront.forward(
            configuration,
            count,
            sequences.steps,
            stack.has_bias,
            stack.dropout,
            x,
            h0,
            c0,
            by_layer,
            False,
        )
        return all_of_it.y, all_of_it.hn, all_of_it.cn
    except RefusedError as error:
        refused[configuration] = str(error)
        raise


def _is_watched(*tensors: Tensor | None) -> bool:
    return torch.is_grad_enabled() and any(
        tensor is not None and tensor.requires_grad for tensor in tensors
    )


def _run_layer(
    configuration: Configuration,
    stack: Stack,
    sequences: Sequences,
    x: Tensor,
    states: Sequence[Tensor | None],
    weights: tuple[Tensor, ...],
) -> tuple[Tensor, ...]:
    weights = tuple(map(dense, weights))
    h0, c0 = states
    if _is_watched(x, h0, c0, *weights):
        reason = configuration.refuses()
        if reason is not None:
            raise RefusedError(reason)
        return apply_layer(x, h0, c0, configuration, sequences, stack.has_bias, *weights)
    made, _ = run(configuration, sequences, x, h0, c0, stack.has_bias, weights, False)
    return (made.y, made.hn) if made.cn is None else (made.y, made.hn, made.cn)
