"""Launch the recurrent kernels on contiguous CUDA tensors of the current device.

Everything these functions promise is in terms of the buffers that forward.cu and backward.cu
describe; the products before and after them are autograd.py's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hfai.kernels.cooperative import RefusedError
from hfai.kernels.rnn import status
from hfai.kernels.rnn.cluster_plan import ClusterPlan
from hfai.kernels.rnn.programs import Configuration, Program

UNSENT = -1
"""In each word of the exchange before the blocks fill it: a NaN that no h is."""


@dataclass(frozen=True)
class Steps:
    """The shape of a call: how many steps and sequences, and which of them are there.

    `lengths` [batch] and `offsets` [steps], int64 on the device, are those of packed sequences: row
    `offsets[t] + b` of the input is step t of sequence b, which has `lengths[b]` steps, longest
    first. Both are None where all sequences have all steps: row `t * batch + b`.
    """

    steps: int
    batch: int
    rows: int
    lengths: Tensor | None = None
    offsets: Tensor | None = None


@dataclass(frozen=True)
class Forward:
    """What the forward kernel makes; `states` and `cells` are for backward alone."""

    y: Tensor
    """[steps, batch, directions * hidden], or of packed sequences [rows, directions * hidden]."""
    hn: Tensor
    """[directions, batch, hidden]."""
    cn: Tensor | None
    states: Tensor | None
    """[directions, steps + 1, batch, width]: h before each step (reverse direction: after it)."""
    cells: Tensor | None
    """[directions, rows, hidden], LSTM's c after each step."""


def forward(
    configuration: Configuration,
    steps: Steps,
    gates: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[tuple[Tensor, Tensor]] | None,
    h0: Tensor | None,
    c0: Tensor | None,
    save: bool,
) -> Forward:
    """Run all steps.

    Args:
        configuration: what fits these tensors.
        steps: the call's shape.
        gates: [directions, rows, gate_pitch], x W_ih^T in the first gates * hidden columns. With
            `save` it is overwritten by what backward needs.
        weights: W_hh of each direction, contiguous.
        biases: b_ih and b_hh of each direction, contiguous, or None.
        h0: [directions, batch, hidden], contiguous, or None for zeros.
        c0: as h0; LSTM only.
        save: whether backward will follow.
    """
    made = room_for(configuration, steps, gates, save)
    words = exchange_words(configuration, steps)
    exchange = torch.full((words,), UNSENT, dtype=torch.int32, device=gates.device)
    stream = torch._C._cuda_getCurrentRawStream(configuration.device)
    enqueue_forward(
        configuration, steps, gates, weights, biases, h0, c0, made, exchange, save, stream
    )
    return made


def room_for(configuration: Configuration, steps: Steps, like: Tensor, save: bool) -> Forward:
    """Return the buffers that a forward pass fills; arguments are as for `forward`."""
    plan = configuration.plan
    directions, hidden, lstm = plan.directions, plan.hidden, plan.cell.has_c
    # In the shape in which it is returned: a view made without gradients may not be changed later.
    rows = (steps.rows,) if steps.lengths is not None else (steps.steps, steps.batch)
    y = like.new_empty(*rows, directions * hidden)
    hn = like.new_empty(directions, steps.batch, hidden)
    cn = torch.empty_like(hn) if lstm else None
    cells = like.new_empty(directions, steps.rows, hidden) if lstm and save else None
    shape = (directions, steps.steps + 1, steps.batch, plan.width)
    states = like.new_empty(shape) if save else None
    return Forward(y, hn, cn, states, cells)


def exchange_words(configuration: Configuration, steps: Steps) -> int:
    """Return how many words of 4 bytes, all `UNSENT`, the blocks of a forward pass trade h in.

    Clusters need none.
    """
    if isinstance(configuration.plan, ClusterPlan):
        return 0
    elements = configuration.plan.exchange_elements(steps.steps, steps.batch)
    return elements * configuration.dtype.itemsize // 4


def mailbox_floats(configuration: Configuration, batch: int) -> int:
    """Return the size of `enqueue_backward`'s mailbox; clusters need none."""
    plan = configuration.plan
    return 0 if isinstance(plan, ClusterPlan) else plan.mailbox_floats(plan.groups(batch))


def enqueue_forward(
    configuration: Configuration,
    steps: Steps,
    gates: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[tuple[Tensor, Tensor]] | None,
    h0: Tensor | None,
    c0: Tensor | None,
    made: Forward,
    exchange: Tensor,
    save: bool,
    stream: int,
) -> None:
    """Launch the forward kernel on buffers that are there.

    Args:
        configuration: as for `forward`, like all that is not said here.
        steps: of this launch.
        gates: of these steps.
        weights: W_hh.
        biases: or None.
        h0: before these steps.
        c0: likewise.
        made: what is filled; all contiguous.
        exchange: `exchange_words` words, int32, all `UNSENT`, or the first of more.
        save: whether backward will follow.
        stream: the raw stream; all tensors must be there in its order and stay until it is done.
    """
    plan = configuration.plan
    in_biases, hidden_biases = zip(*biases, strict=True) if biases else ((), ())
    pointers = [
        _pointer(gates),
        *_both(weights),
        *_both(in_biases),
        *_both(hidden_biases),
        *map(_pointer, (h0, c0)),
        *(() if isinstance(plan, ClusterPlan) else (_pointer(exchange),)),
        *map(_pointer, (made.states, made.y, made.cells, made.hn, made.cn)),
        *map(_pointer, (steps.lengths, steps.offsets)),
    ]
    program = configuration.forward(save)
    if isinstance(plan, ClusterPlan):
        grid = plan.clusters(steps.batch) * plan.forward_shape.cluster
        _launch_clusters(configuration, program, grid, stream, pointers, steps)
        return
    for first, count in waves(program, plan.groups(steps.batch)):
        program.kernel.launch(
            count * plan.blocks,
            stream,
            *pointers,
            steps.steps,
            steps.batch,
            steps.rows,
            first,
            status.address(configuration.device),
        )


def backward(
    configuration: Configuration,
    steps: Steps,
    kept: Tensor,
    cells: Tensor | None,
    states: Tensor,
    weights: Sequence[Tensor],
    c0: Tensor | None,
    dy: Tensor | None,
    dhn: Tensor | None,
    dcn: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Run all steps backwards.

    Args:
        configuration: as given to `forward`.
        steps: as given to `forward`.
        kept: `gates` as `forward` left it.
        cells: as `forward` returned it.
        states: as `forward` returned it.
        weights: as given to `forward`.
        c0: as given to `forward`.
        dy: the gradient of y, contiguous, or None for zeros; likewise dhn and dcn.
        dhn: of hn.
        dcn: of cn.

    Returns:
        dgates [directions, rows, gate_pitch], in backward.cu's order; dh0; dc0 or None.
    """
    plan = configuration.plan
    dgates = torch.empty_like(kept)
    dh0 = kept.new_empty(plan.directions, steps.batch, plan.hidden)
    dc0 = torch.empty_like(dh0) if plan.cell.has_c else None
    stream = torch._C._cuda_getCurrentRawStream(configuration.device)
    saved, gradients = (kept, cells, states, c0), (dy, dhn, dcn)
    enqueue_backward(
        configuration, steps, saved, weights, gradients, (dgates, dh0, dc0), None, stream
    )
    return dgates, dh0, dc0


def enqueue_backward(
    configuration: Configuration,
    steps: Steps,
    saved: tuple[Tensor, Tensor | None, Tensor, Tensor | None],
    weights: Sequence[Tensor],
    gradients: tuple[Tensor | None, Tensor | None, Tensor | None],
    made: tuple[Tensor, Tensor, Tensor | None],
    mailbox: Tensor | None,
    stream: int,
) -> None:
    """Launch the backward kernel on buffers that are there.

    Args:
        configuration: as for `backward`, like all that is not said here.
        steps: of this launch.
        saved: `kept`, `cells`, `states` and `c0` of these steps.
        weights: W_hh.
        gradients: dy of these steps, dhn and dcn after them.
        made: what is filled: dgates, dh0, dc0.
        mailbox: zeros, float32, enough for all groups at once (clusters need none); None: made
            here, for which `stream` must be the current one.
        stream: the raw stream; all tensors must be there in its order and stay until it is done.
    """
    plan, device = configuration.plan, saved[0].device
    kept, cells, states, c0 = saved
    program = configuration.backward()
    pointers = [
        *map(_pointer, (kept, cells, c0, states, *gradients)),
        *_both(weights),
        *map(_pointer, made),
    ]
    if isinstance(plan, ClusterPlan):
        pointers += map(_pointer, (steps.lengths, steps.offsets))
        grid = plan.clusters(steps.batch) * plan.backward_shape.cluster
        _launch_clusters(configuration, program, grid, stream, pointers, steps)
        return
    for first, count in waves(program, plan.groups(steps.batch)):
        if mailbox is None or first:
            mailbox = torch.zeros(plan.mailbox_floats(count), dtype=torch.float32, device=device)
        program.kernel.launch(
            count * plan.blocks,
            stream,
            *pointers,
            _pointer(mailbox),
            *map(_pointer, (steps.lengths, steps.offsets)),
            steps.steps,
            steps.batch,
            steps.rows,
            first,
            status.address(configuration.device),
        )


def _launch_clusters(
    configuration: Configuration,
    program: Program,
    grid: int,
    stream: int,
    pointers: Sequence[int],
    steps: Steps,
) -> None:
    """Launch any number of clusters: the device runs them as it has room."""
    if program.groups_at_once < 1:
        raise RefusedError("the device has no room for a cluster of the recurrent kernel's blocks")
    program.kernel.launch(
        grid,
        stream,
        *pointers,
        steps.steps,
        steps.batch,
        steps.rows,
        status.address(configuration.device),
    )


def waves(program: Program, groups: int) -> list[tuple[int, int]]:
    """Cut the groups into launches: the first group of each, and how many."""
    at_once = program.groups_at_once
    if at_once < 1:
        raise RefusedError("the device has no room for the recurrent kernel's blocks at once")
    return [(first, min(at_once, groups - first)) for first in range(0, groups, at_once)]


def _pointer(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _both(tensors: Sequence[Tensor]) -> tuple[int, int]:
    """Return the addresses for direction 0 and 1."""
    return (tensors[0].data_ptr(), tensors[-1].data_ptr()) if tensors else (0, 0)
