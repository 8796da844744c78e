"""What `launch.forward` and `launch.backward` promise, written in torch a step at a time.

The same arguments, the same buffers in the same layouts, every other element poisoned: what reads
them (products, autograd, the module) can so be tested where there is no GPU. The kernels' own
sources are held to the same promises in test_emulated.py and, on a GPU, in tests/gpu/nn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor

from hfai.kernels import coverage, jit
from hfai.kernels.rnn import autograd, call, cluster_dispatch, dispatch, launch, status
from hfai.kernels.rnn.launch import Forward, Steps
from hfai.kernels.rnn.plan import Cell
from hfai.kernels.rnn.programs import Configuration, refused
from tests.kernels.compiled import DEVICES


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
    """As `launch.forward`; what it computes is rounded where the kernel rounds it."""
    _check(configuration, steps, gates, *weights, *(b for pair in biases or () for b in pair))
    plan, dtype = configuration.plan, configuration.dtype
    hidden, cell, batch = plan.hidden, plan.cell, steps.batch
    shape = (steps.rows,) if steps.lengths is not None else (steps.steps, batch)
    whole_y = _poisoned(gates, *shape, plan.directions * hidden)
    y = whole_y.detach().view(steps.rows, -1)
    hn, cn = (_poisoned(gates, plan.directions, batch, hidden) for _ in range(2))
    states = _poisoned(gates, plan.directions, steps.steps + 1, batch, plan.width)
    states[..., hidden:] = 0
    cells = _poisoned(gates, plan.directions, steps.rows, hidden)
    for d in range(plan.directions):
        h, c = (
            gates.new_zeros(batch, hidden).double() if state is None else state[d].double()
            for state in (h0, c0)
        )
        states[d, steps.steps if d else 0, :, :hidden] = h
        b_ih, b_hh = (b.double() for b in biases[d]) if biases else (0.0, 0.0)
        for t, rows in _in_order(steps, reverse=d == 1):
            count = rows.stop - rows.start
            from_input = gates[d, rows, : cell.gates * hidden].double() + b_ih
            from_hidden = h[:count] @ weights[d].double().t() + b_hh
            kept, new_h, new_c = _cell(cell, from_input, from_hidden, h[:count], c[:count])
            h, c = h.clone(), c.clone()
            h[:count] = new_h.to(dtype).double()
            c[:count] = new_c
            gates[d, rows] = math.nan
            if save and cell.kept > 1:
                gates[d, rows, : cell.kept * hidden] = kept.to(dtype)
            cells[d, rows] = c[:count].to(dtype)
            y[rows, d * hidden : (d + 1) * hidden] = h[:count].to(dtype)
            states[d, t if d else t + 1, :, :hidden] = h.to(dtype)
        hn[d], cn[d] = h, c
    lstm = cell.has_c
    return Forward(
        whole_y,
        hn,
        cn if lstm else None,
        states if save else None,
        cells if lstm and save else None,
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
    """As `launch.backward`."""
    _check(
        configuration,
        steps,
        kept,
        states,
        *weights,
        *(t for t in (dy, dhn, dcn) if t is not None),
    )
    plan = configuration.plan
    hidden, cell, batch = plan.hidden, plan.cell, steps.batch
    dgates = torch.full_like(kept, math.nan)
    dy = None if dy is None else dy.view(steps.rows, -1)
    dh0, dc0 = (_poisoned(kept, plan.directions, batch, hidden) for _ in range(2))
    for d in range(plan.directions):
        dh, dc = (
            kept.new_zeros(batch, hidden).double() if g is None else g[d].double()
            for g in (dhn, dcn)
        )
        weight = weights[d].double()
        for t, rows in _in_order(steps, reverse=d == 0):
            count = rows.stop - rows.start
            slots = states[d, :, :count, :hidden].double()
            before, after = (slots[t + 1], slots[t]) if d else (slots[t], slots[t + 1])
            here = dh[:count]
            if dy is not None:
                here = here + dy[rows, d * hidden : (d + 1) * hidden].double()
            values = kept[d, rows, : cell.kept * hidden].double().chunk(cell.kept, -1)
            dh, dc = dh.clone(), dc.clone()
            if cell is Cell.LSTM:
                assert cells is not None
                i, f, g, o = values
                now = cells[d, rows].double().tanh()
                earlier = _c_before(steps, cells[d], None if c0 is None else c0[d], d, t, count)
                dcell = dc[:count] + here * o * (1 - now**2)
                parts = [
                    dcell * g * i * (1 - i),
                    dcell * earlier * f * (1 - f),
                    dcell * i * (1 - g**2),
                    here * now * o * (1 - o),
                ]
                recurrent, beside = torch.cat(parts, -1), 0.0
                dc[:count] = dcell * f
            elif cell is Cell.GRU:
                r, z, n, q = values
                dn = here * (1 - z) * (1 - n**2)
                dr, dz = dn * q * r * (1 - r), here * (before - n) * z * (1 - z)
                parts = [dn, dr, dz, dn * r]
                recurrent, beside = torch.cat(parts[1:], -1), here * z
            else:
                slope = (after > 0) if cell is Cell.RNN_RELU else 1 - after**2
                parts = [here * slope]
                recurrent, beside = parts[0], 0.0
            dgates[d, rows, : cell.kept * hidden] = torch.cat(parts, -1).to(kept.dtype)
            dh[:count] = recurrent @ weight + beside
        dh0[d], dc0[d] = dh, dc
    return dgates, dh0, dc0 if cell.has_c else None


@pytest.fixture
def every_size_is_ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let calls take the grid kernels' path that are too small to gain by it, or too large."""
    monkeypatch.setattr(dispatch, "MOST_SEQUENCES", 1 << 16)
    monkeypatch.setattr(dispatch, "FEWEST_STEPS", 1)
    monkeypatch.setattr(dispatch, "FEWEST_UNITS", dict.fromkeys(Cell, 1))
    monkeypatch.setattr(cluster_dispatch, "most_sequences", lambda *layer: 0)
    call._found.cache_clear()
    yield
    call._found.cache_clear()


@pytest.fixture
def clusters_where_they_fit(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let calls take the cluster kernels' path that gain nothing by it."""
    monkeypatch.setattr(dispatch, "FEWEST_STEPS", 1)
    monkeypatch.setattr(cluster_dispatch, "most_sequences", lambda *layer: 1 << 16)
    call._found.cache_clear()
    yield
    call._found.cache_clear()


@pytest.fixture
def kernels_on_cpu(
    monkeypatch: pytest.MonkeyPatch, every_size_is_ours: None
) -> Iterator[list[str]]:
    """Let recurrent layers on the CPU take the kernels' path, the launches done by hand.

    Yields the list of launches made since.
    """
    made: list[str] = []

    def counted(name: str, function: object) -> object:
        def run(*arguments: object) -> object:
            made.append(name)
            return function(*arguments)  # type: ignore[operator]

        return run

    def why_not_plain(tensor: Tensor) -> str | None:
        reason = coverage.why_not_plain(tensor)
        on_cpu = reason is not None and "on cpu" in reason
        return None if on_cpu and torch._C._has_storage(tensor) else reason

    monkeypatch.setattr(launch, "forward", counted("forward", forward))
    monkeypatch.setattr(launch, "backward", counted("backward", backward))
    monkeypatch.setattr(Configuration, "refuses", lambda self: refused.get(self))
    monkeypatch.setattr(call, "is_on_gpu", lambda tensor: True)
    for module in (call, autograd):
        monkeypatch.setattr(module, "why_not_plain", why_not_plain)
    monkeypatch.setattr(call, "current_device", lambda: -1)
    monkeypatch.setattr(call, "allows_tf32", lambda: False)
    monkeypatch.setattr(jit, "why_unavailable", lambda device=None: None)
    monkeypatch.setattr(jit, "device_limits", lambda device: DEVICES["sm_90"])
    monkeypatch.setattr(status, "raise_if_lost", lambda device: None)
    call._found.cache_clear()
    yield made
    call._found.cache_clear()


def _cell(
    cell: Cell, from_input: Tensor, from_hidden: Tensor, h: Tensor, c: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is kept, h and c."""
    if cell is Cell.GRU:
        x_r, x_z, x_n = from_input.chunk(3, -1)
        h_r, h_z, q = from_hidden.chunk(3, -1)
        r, z = (x_r + h_r).sigmoid(), (x_z + h_z).sigmoid()
        n = (x_n + r * q).tanh()
        return torch.cat([r, z, n, q], -1), (1 - z) * n + z * h, c
    total = from_input + from_hidden
    if cell is Cell.LSTM:
        i, f, g, o = total.chunk(4, -1)
        i, f, g, o = i.sigmoid(), f.sigmoid(), g.tanh(), o.sigmoid()
        c = f * c + i * g
        return torch.cat([i, f, g, o], -1), o * c.tanh(), c
    return total, total.tanh() if cell is Cell.RNN_TANH else total.relu(), c


def _c_before(
    steps: Steps, cells: Tensor, c0: Tensor | None, direction: int, t: int, count: int
) -> Tensor:
    """Return c before step t, for the first `count` sequences."""
    result = cells.new_zeros(count, cells.shape[1]).double() if c0 is None else c0[:count].double()
    result = result.clone()
    other = t + 1 if direction else t - 1
    if 0 <= other < steps.steps:
        rows = dict(_in_order(steps))[other]
        there = min(count, rows.stop - rows.start)
        result[:there] = cells[rows][:there].double()
    return result


def _in_order(steps: Steps, reverse: bool = False) -> list[tuple[int, slice]]:
    """Return each step and its rows of the input."""
    if steps.lengths is None or steps.offsets is None:
        rows = [slice(t * steps.batch, (t + 1) * steps.batch) for t in range(steps.steps)]
    else:
        counts = [int((steps.lengths > t).sum()) for t in range(steps.steps)]
        starts = steps.offsets.tolist()
        rows = [slice(start, start + count) for start, count in zip(starts, counts, strict=True)]
    return list(enumerate(rows))[:: -1 if reverse else 1]


def _check(configuration: Configuration, steps: Steps, *tensors: Tensor) -> None:
    """The kernels read addresses: what they are given must lie as they think."""
    for tensor in tensors:
        assert tensor.is_contiguous()
        assert tensor.dtype == configuration.dtype
    if steps.lengths is not None:
        assert steps.lengths.dtype == torch.int64
        assert steps.lengths.shape == (steps.batch,)
        assert int(steps.lengths.sum()) == steps.rows
    else:
        assert steps.rows == steps.steps * steps.batch


def _poisoned(like: Tensor, *shape: int) -> Tensor:
    return torch.full(shape, math.nan, dtype=like.dtype, device=like.device)
