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
    plan, dtype, device = configuration.plan, configuration.dtype, gates.device
    directions, hidden = plan.directions, plan.hidden
    lstm = plan.cell.has_c
    exchange = None
    if not isinstance(plan, ClusterPlan):
        words = plan.exchange_elements(steps.steps, steps.batch) * dtype.itemsize // 4
        exchange = torch.full((words,), -1, dtype=torch.int32, device=device)
    # In the shape in which it is returned: a view made without gradients may not be changed later.
    rows = (steps.rows,) if steps.lengths is not None else (steps.steps, steps.batch)
    y = gates.new_empty(*rows, directions * hidden)
    hn = gates.new_empty(directions, steps.batch, hidden)
    cn = torch.empty_like(hn) if lstm else None
    cells = gates.new_empty(directions, steps.rows, hidden) if lstm and save else None
    shape = (directions, steps.steps + 1, steps.batch, plan.width)
    states = gates.new_empty(shape) if save else None
    in_biases, hidden_biases = zip(*biases, strict=True) if biases else ((), ())
    pointers = [
        _pointer(gates),
        *_both(weights),
        *_both(in_biases),
        *_both(hidden_biases),
        *map(_pointer, (h0, c0)),
        *(() if isinstance(plan, ClusterPlan) else (_pointer(exchange),)),
        *map(_pointer, (states, y, cells, hn, cn, steps.lengths, steps.offsets)),
    ]
    program = configuration.forward(save)
    stream = torch._C._cuda_getCurrentRawStream(configuration.device)
    if isinstance(plan, ClusterPlan):
        grid = plan.clusters(steps.batch) * plan.forward_shape.cluster
        _launch_clusters(configuration, program, grid, stream, pointers, steps)
        return Forward(y, hn, cn, states, cells)
    for first, count in _waves(program, plan.groups(steps.batch)):
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
    return Forward(y, hn, cn, states, cells)


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
    plan, device = configuration.plan, kept.device
    dgates = torch.empty_like(kept)
    dh0 = kept.new_empty(plan.directions, steps.batch, plan.hidden)
    dc0 = torch.empty_like(dh0) if plan.cell.has_c else None
    program = configuration.backward()
    stream = torch._C._cuda_getCurrentRawStream(configuration.device)
    pointers = [
        *map(_pointer, (kept, cells, c0, states, dy, dhn, dcn)),
        *_both(weights),
        *map(_pointer, (dgates, dh0, dc0)),
    ]
    if isinstance(plan, ClusterPlan):
        pointers += map(_pointer, (steps.lengths, steps.offsets))
        grid = plan.clusters(steps.batch) * plan.backward_shape.cluster
        _launch_clusters(configuration, program, grid, stream, pointers, steps)
        return dgates, dh0, dc0
    for first, count in _waves(program, plan.groups(steps.batch)):
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
    return dgates, dh0, dc0


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


def _waves(program: Program, groups: int) -> list[tuple[int, int]]:
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
