"""LSTM, GRU and RNN: torch's modules with one persistent kernel a layer behind `forward`.

Parameters are read by attribute on every call, since weight norm, pruning, DropConnect, FSDP and
adapters replace them; nothing is kept between calls. A call that the kernels do not cover, or that
torch must refuse, goes to torch's own forward as it came.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from hfai.kernels.cooperative import RefusedError
from hfai.kernels.coverage import PLAIN_TYPES, why_watched
from hfai.kernels.rnn import call, dispatch
from hfai.kernels.rnn.autograd import Sequences
from hfai.kernels.rnn.call import Stack
from hfai.kernels.rnn.launch import Steps
from hfai.kernels.rnn.plan import Cell
from hfai.nn.path import Path
from hfai.nn.stand_in import as_leaf, as_torch, is_compiling, proxy_among

Hidden: TypeAlias = Any
"""h of [layers * directions, batch, hidden], or for LSTM a pair of h and c."""
States: TypeAlias = tuple[Tensor | None, Tensor | None]
"""h0 and c0, each None for zeros."""


class LSTM(nn.LSTM):
    """`torch.nn.LSTM`, faster on CUDA for fp32, fp16 and bf16.

    Takes and returns what torch's class does, from the same parameters under the same names. Beyond
    it, backward also works in evaluation mode.
    """

    def forward(self, input: Any, hx: Hidden = None) -> Any:
        """Run all layers over `input`, [steps, batch, inputs] or as the module's options say."""
        if not is_compiling():
            outputs = _forward(self, input, hx)
            if outputs is not None:
                return outputs
        # torch's class by name: a forward that was kept aside may outlive the conversion back.
        return nn.LSTM.forward(self, input, hx)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what torch.jit.script compiles in this layer's place."""
        return as_torch(self, nn.LSTM)

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self)


class GRU(nn.GRU):
    """`torch.nn.GRU`, faster on CUDA for fp32, fp16 and bf16; see `LSTM`."""

    def forward(self, input: Any, hx: Hidden = None) -> Any:
        """Run all layers over `input`, [steps, batch, inputs] or as the module's options say."""
        if not is_compiling():
            outputs = _forward(self, input, hx)
            if outputs is not None:
                return outputs
        return nn.GRU.forward(self, input, hx)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what torch.jit.script compiles in this layer's place."""
        return as_torch(self, nn.GRU)

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self)


class RNN(nn.RNN):
    """`torch.nn.RNN` (tanh or relu), faster on CUDA for fp32, fp16 and bf16; see `LSTM`."""

    def forward(self, input: Any, hx: Hidden = None) -> Any:
        """Run all layers over `input`, [steps, batch, inputs] or as the module's options say."""
        if not is_compiling():
            outputs = _forward(self, input, hx)
            if outputs is not None:
                return outputs
        return nn.RNN.forward(self, input, hx)

    def __prepare_scriptable__(self) -> nn.Module:
        """Return what torch.jit.script compiles in this layer's place."""
        return as_torch(self, nn.RNN)

    def explain_path(self) -> Path:
        """Return the path that calls take with the parameters as they are now."""
        return _explain(self)


def _forward(module: nn.RNNBase, input: Any, hx: Hidden) -> Any:
    """Run a call on our kernels, or return None: torch's turn."""
    packed = type(input) is PackedSequence
    data = input.data if packed else input
    if proxy_among(input, hx) is not None:
        return as_leaf(module, input, hx)
    if type(data) not in PLAIN_TYPES or not call.is_on_gpu(data):
        return None
    if why_watched() is not None or module.proj_size:
        return None
    if data.dim() not in ((2,) if packed else (2, 3)) or data.numel() == 0:
        return None
    stack = _stack(module)
    states = _states(stack.cell, hx)
    if states is None:
        return None
    target = _autocast_dtype(data)
    if target is not None:
        data = data.to(target)
        stack = stack.to(target)
        states = _each(states, lambda state: state.to(target))
    if call.why_not_covered(stack, data) is not None or data.shape[-1] != module.input_size:
        return None
    try:
        if packed:
            return _run_packed(stack, input, data, states)
        return _run_padded(stack, module.batch_first, data, states)
    except RefusedError:  # remembered: the next call does not come this far
        return None


def _run_padded(stack: Stack, batch_first: bool, x: Tensor, states: States) -> Any:
    unbatched = x.dim() == 2
    if unbatched:
        x = x.unsqueeze(1)
        if any(state is not None and state.dim() != 2 for state in states):
            return None
        states = _each(states, lambda state: state.unsqueeze(1))
    elif batch_first:
        x = x.transpose(0, 1)
    steps, batch, inputs = x.shape
    if not _are_states_of(stack, x, batch, states):
        return None
    configuration = call.configure(stack, x.get_device(), x.dtype, batch, steps)
    if configuration is None:
        return None
    sequences = Sequences(Steps(steps, batch, steps * batch))
    y, hn, cn = call.run_stack(
        configuration, stack, sequences, x.reshape(steps * batch, inputs), *states
    )
    if unbatched:
        y, hn, cn = y.squeeze(1), hn.squeeze(1), None if cn is None else cn.squeeze(1)
    elif batch_first:
        y = y.transpose(0, 1)
    return y, hn if cn is None else (hn, cn)


def _run_packed(
    stack: Stack,
    packed: PackedSequence,
    x: Tensor,
    states: States,
) -> Any:
    sizes = packed.batch_sizes
    if not _are_batch_sizes(sizes):
        return None
    batch = int(sizes[0])
    if not _are_states_of(stack, x, batch, states) or int(sizes.sum()) != x.shape[0]:
        return None
    configuration = call.configure(stack, x.get_device(), x.dtype, batch, sizes.numel())
    if configuration is None:
        return None
    if packed.sorted_indices is not None:
        order = packed.sorted_indices
        states = _each(states, lambda state: state.index_select(1, order))
    y, hn, cn = call.run_stack(configuration, stack, packed_sequences(sizes, x.device), x, *states)
    if packed.unsorted_indices is not None:
        hn = hn.index_select(1, packed.unsorted_indices)
        cn = None if cn is None else cn.index_select(1, packed.unsorted_indices)
    output = PackedSequence(y, sizes, packed.sorted_indices, packed.unsorted_indices)
    return output, hn if cn is None else (hn, cn)


def _are_batch_sizes(sizes: Any) -> bool:
    """Return whether these are what a `PackedSequence` promises; torch has words where not."""
    return (
        type(sizes) is Tensor
        and sizes.device.type == "cpu"
        and sizes.dtype == torch.int64
        and sizes.dim() == 1
        and sizes.numel() > 0
        and bool((sizes[1:] <= sizes[:-1]).all())
        and int(sizes[-1]) >= 0
    )


def packed_sequences(batch_sizes: Tensor, device: torch.device) -> Sequences:
    """Return how packed sequences lie in memory.

    Args:
        batch_sizes: as in `PackedSequence`: int64 on the CPU, not increasing.
        device: where the kernels will read it.
    """
    steps, batch = batch_sizes.numel(), int(batch_sizes[0])
    # Three small tables in one copy to the device.
    there = torch.arange(batch, device="cpu").unsqueeze(0) < batch_sizes.unsqueeze(
        1
    )  # [steps, batch]
    lengths = there.sum(0)
    offsets = batch_sizes.cumsum(0) - batch_sizes
    rows = there.flatten().nonzero().squeeze(1)
    tables = torch.cat([lengths, offsets, rows])
    if device.type == "cuda":
        tables = tables.pin_memory().to(device, non_blocking=True)
    of_steps, of_rows = batch, batch + steps
    return Sequences(
        Steps(steps, batch, rows.numel(), tables[:of_steps], tables[of_steps:of_rows]),
        tuple(batch_sizes.tolist()),
        tables[of_rows:],
    )


def _stack(module: nn.RNNBase) -> Stack:
    weights = tuple(
        tuple(
            getattr(module, name)
            for direction in range(1 + module.bidirectional)
            for name in module._all_weights[layer * (1 + module.bidirectional) + direction]
        )
        for layer in range(module.num_layers)
    )
    return Stack(
        cell=Cell[module.mode],
        hidden=module.hidden_size,
        directions=1 + module.bidirectional,
        has_bias=module.bias,
        weights=weights,
        dropout=float(module.dropout) if module.training else 0.0,
    )


def _states(cell: Cell, hx: Hidden) -> States | None:
    """Return h0 and c0, each None for zeros; None where hx is no such thing."""
    if hx is None:
        return None, None
    if cell.has_c:
        if not isinstance(hx, (tuple, list)) or len(hx) != 2:
            return None
        h0, c0 = hx
        return (h0, c0) if type(h0) in PLAIN_TYPES and type(c0) in PLAIN_TYPES else None
    return (hx, None) if type(hx) in PLAIN_TYPES else None


def _each(states: States, change: Callable[[Tensor], Tensor]) -> States:
    h0, c0 = states
    return None if h0 is None else change(h0), None if c0 is None else change(c0)


def _are_states_of(stack: Stack, x: Tensor, batch: int, states: States) -> bool:
    wanted = (len(stack.weights) * stack.directions, batch, stack.hidden)
    return all(
        state is None
        or (tuple(state.shape) == wanted and state.dtype == x.dtype and state.device == x.device)
        for state in states
    )


def _autocast_dtype(data: Tensor) -> torch.dtype | None:
    """Return the type that torch's autocast casts a recurrent layer's tensors to, or None."""
    if not torch.is_autocast_enabled("cuda") or not data.is_floating_point():
        return None
    return None if data.dtype == torch.float64 else torch.get_autocast_dtype("cuda")


def _explain(module: nn.RNNBase) -> Path:
    """Answer for the usual case: a call without autocast, its input like the parameters."""
    if not torch.cuda.is_available():
        return Path("torch", "no CUDA device: the kernels are for CUDA")
    if module.proj_size:
        return Path("torch", "proj_size is not covered")
    stack = _stack(module)
    weight = stack.weights[0][0]
    reason = call.why_not_covered(stack, weight)
    device, dtype = weight.get_device(), weight.dtype
    if reason is None:
        reason = call.why_not_configured(stack, device, dtype, 1, dispatch.FEWEST_STEPS)
    if reason is not None:
        return Path("torch", reason)
    most = call.largest_batch(stack, device, dtype)
    configuration = call.configure(stack, device, dtype, 1, dispatch.FEWEST_STEPS)
    assert configuration is not None
    return Path(
        "hfai",
        f"one kernel for all steps{configuration.plan.where}, from {dispatch.FEWEST_STEPS} steps "
        f"and up to batch {most}",
    )
