"""What is LSTM's, GRU's and RNN's own, on torch's class and on ours, kernels included.

Where there is no GPU, ours is run twice: as it is, on torch's path, and with the two launches done
by hand (tests/kernels/rnn/by_hand.py), so that all else on the kernels' path is what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence

import hfai.nn
from hfai.nn import to_hfai
from tests.kernels.rnn.by_hand import kernels_on_cpu
from tests.nn.operator_cases import assert_same_bits, tensors, weighted_sum

__all__ = ["kernels_on_cpu"]

Build = Callable[..., nn.Module]
KINDS = [("LSTM", {}), ("GRU", {}), ("RNN", {}), ("RNN", {"nonlinearity": "relu"})]


@pytest.fixture(params=["torch", "hfai", "hfai's kernels"])
def flavour(request: pytest.FixtureRequest, device: torch.device) -> str:
    """Torch's class, ours on torch's path, ours on the kernels' path."""
    if request.param == "hfai's kernels" and device.type == "cpu":
        request.getfixturevalue("kernels_on_cpu")
    return str(request.param)


@pytest.fixture(params=KINDS, ids=["LSTM", "GRU", "RNN-tanh", "RNN-relu"])
def build(request: pytest.FixtureRequest, flavour: str, device: torch.device) -> Build:
    """Builds each of the layers, on the device, with the same parameters whatever the class."""
    name, keywords = request.param

    def made(*arguments: Any, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
        layer: nn.Module = getattr(nn, name)(*arguments, **keywords, **options)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.uniform_(-0.4, 0.4, generator=generator)
        layer = layer.to(device, dtype)
        return layer if flavour == "torch" else to_hfai(layer)

    return made


@pytest.fixture(autouse=True)
def _ieee() -> Iterator[None]:
    """fp32 in fp32: TF32 has tests of its own."""
    with torch.backends.cudnn.flags(allow_tf32=False):
        yield


def double(layer: nn.Module) -> nn.Module:
    """Return torch's class in float64 on the CPU with the parameters that `layer` has now."""
    names = ["input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"]
    options = {name: getattr(layer, name) for name in [*names, "bidirectional"]}
    kind = layer.mode.split("_")[0]
    if kind == "RNN":
        options["nonlinearity"] = layer.nonlinearity
    if kind == "LSTM":
        options["proj_size"] = layer.proj_size
    made: nn.Module = getattr(nn, kind)(**options).double()
    made.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    return made.train(layer.training)


def hidden_state(layer: nn.Module, batch: int, dtype: torch.dtype = torch.float64) -> Any:
    """Draw h0, or h0 and c0, on the CPU."""
    generator = torch.Generator().manual_seed(5)
    shape = (layer.num_layers * (1 + layer.bidirectional), batch, layer.hidden_size)
    h0, c0 = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(2))
    return (h0, c0) if layer.mode == "LSTM" else h0


def leaves(value: Any, device: torch.device | str, dtype: torch.dtype) -> Any:
    """Copy tensors, or a structure of them, to leaves that require a gradient."""
    if isinstance(value, tuple):
        return tuple(leaves(v, device, dtype) for v in value)
    return value.detach().to(device, dtype).requires_grad_()


def gradients(layer: nn.Module, call: Callable[..., Any], x: Any, hx: Any) -> list[Tensor | None]:
    """Return outputs and the gradients of x, hx and the parameters."""
    outputs = call(layer, x, hx) if hx is not None else call(layer, x)
    inputs = [*tensors((x,)), *tensors((hx,)), *layer.parameters()]
    found = torch.autograd.grad(weighted_sum(outputs), inputs, allow_unused=True)
    return [*tensors(outputs), *found]


def check(
    layer: nn.Module,
    x: Tensor,
    hx: Any = None,
    call: Callable[..., Any] = lambda layer, *inputs: layer(*inputs),
    tolerance: float = 2e-5,
) -> None:
    """Compare outputs and all gradients with torch's class in float64 on the CPU."""
    parameter = next(layer.parameters())
    device, dtype = parameter.device, parameter.dtype
    actual = gradients(layer, call, leaves(x, device, dtype),
                       None if hx is None else leaves(hx, device, dtype))
    reference = double(layer)
    expected = gradients(
        reference, call, leaves(x.to(dtype), "cpu", torch.float64),
        None if hx is None else leaves(tuple(h.to(dtype) for h in hx) if isinstance(hx, tuple) else hx.to(dtype), "cpu", torch.float64))
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        assert (one is None) == (other is None)
        if one is None or other is None:
            continue
        assert one.dtype == dtype
        scale = max(1.0, other.abs().max().item())
        torch.testing.assert_close(
            one.detach().double().cpu(), other.detach(), rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
def test_every_option_matches_float64(
    build: Build, bidirectional: bool, num_layers: int, bias: bool, batch_first: bool
) -> None:
    layer = build(5, 6, num_layers=num_layers, bias=bias, batch_first=batch_first,
                  bidirectional=bidirectional)
    batch = 3
    x = torch.randn(4, batch, 5, dtype=torch.float64)
    x = x.transpose(0, 1).contiguous() if batch_first else x
    check(layer, x, hidden_state(layer, batch))
    check(layer, x)
