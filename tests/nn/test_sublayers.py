"""Encoder layers whose sublayers end in one kernel, which runs on the CPU here (its emulator)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hfai.kernels import residual_norm
from hfai.kernels.mha import call as mha_call
from hfai.kernels.residual_norm import call, launch
from hfai.nn import to_hfai
from tests.kernels.residual_norm.emulated import HostConfiguration
from tests.kernels.rnn.emulated import COMPILER

pytestmark = pytest.mark.skipif(COMPILER is None, reason="compiles the kernels for the CPU")

E, H, B, L = 32, 4, 3, 8


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Send CPU tensors the way of CUDA ones; return what is asked of each forward launch."""
    monkeypatch.setattr(mha_call, "also_on_cpu", True)
    monkeypatch.setattr(call, "make_configuration", HostConfiguration)
    monkeypatch.setattr(call, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(call, "_configurations", {})
    seen: list[dict[str, Any]] = []
    forward = launch.forward

    def watched(*arguments: Any, **wanted: Any) -> Any:
        seen.append(wanted | {"branch_bias": arguments[2] is not None})
        return forward(*arguments, **wanted)

    monkeypatch.setattr(launch, "forward", watched)
    return seen


def layers(**keywords: Any) -> tuple[nn.TransformerEncoderLayer, nn.TransformerEncoderLayer]:
    """Return torch's layer, and ours with the same parameters."""
    options = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True} | keywords
    torchs = nn.TransformerEncoderLayer(E, H, **options)
    for parameter in torchs.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return torchs, to_hfai(copy.deepcopy(torchs))


def gradients(layer: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return a call's output, and the gradients of the input and of all parameters."""
    x = x.clone().requires_grad_()
    y = layer(x)
    inputs = [x, *layer.parameters()]
    return y, list(torch.autograd.grad(y, inputs, dy.to(y.dtype)))


def relative_error(one: Tensor, other: Tensor) -> float:
    return ((one.double() - other.double()).norm() / other.double().norm()).item()


@pytest.mark.parametrize(
    ("norm_first", "batch_first", "autocast"),
    [(True, True, True), (True, False, False), (False, True, False), (False, False, True)],
)
def test_results_are_torchs(
    launches: list[dict[str, Any]], norm_first: bool, batch_first: bool, autocast: bool
) -> None:
    torch.manual_seed(0)
    torchs, ours = layers(norm_first=norm_first, batch_first=batch_first)
    x, dy = torch.randn(B, L, E), torch.randn(B, L, E)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = gradients(torchs, x, dy)
        made = gradients(ours, x, dy)
    exact = gradients(copy.deepcopy(torchs).double(), x.double(), dy.double())
    assert made[0].dtype is torch.float32
    triples = zip(
        [made[0], *made[1]], [expected[0], *expected[1]], [exact[0], *exact[1]], strict=True
    )
    for one, other, true in triples:
        assert relative_error(one, true) < 1.5 * relative_error(other, true) + 1e-6
    # One sum in the middle of a layer that takes the norm first, two in one that takes it last.
    assert [seen["half"] for seen in launches] == ([autocast] if norm_first else [autocast, False])
    assert [seen["branch_bias"] for seen in launches] == ([False] if norm_first else [False, True])


@pytest.mark.parametrize(("norm_first", "autocast"), [(True, False), (False, True)])
def test_decoder_layers_return_what_torchs_do(
    launches: list[dict[str, Any]], norm_first: bool, autocast: bool
) -> None:
    torch.manual_seed(0)
    torchs = nn.TransformerDecoderLayer(
        E, H, 48, dropout=0.0, batch_first=True, norm_first=norm_first
    )
    ours = to_hfai(copy.deepcopy(torchs))
    x, memory, dy = torch.randn(B, L, E), torch.randn(B, L + 2, E), torch.randn(B, L, E)
    padding = torch.arange(L + 2) >= torch.tensor([[L + 2], [3], [5]])
    options = {
        "tgt_mask": torch.ones(L, L, dtype=torch.bool).triu(1),
        "memory_key_padding_mask": padding,
        "tgt_is_causal": True,
    }

    def run(layer: nn.Module, dtype: torch.dtype) -> list[Tensor]:
        leaf, read = x.to(dtype).requires_grad_(), memory.to(dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast and dtype is torch.float32):
            y = layer(leaf, read, **options)
        return [y, *torch.autograd.grad(y, [leaf, read, *layer.parameters()], dy.to(y.dtype))]

    exact = run(copy.deepcopy(torchs).double(), torch.float64)
    expected, made = run(torchs, torch.float32), run(ours, torch.float32)
    for one, other, true in zip(made, expected, exact, strict=True):
        assert relative_error(one, true) < 1.5 * relative_error(other, true) + 1e-6
    assert len(launches) == (2 if norm_first else 3)


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpointed_layer_drops_the_same_when_it_runs_again(
    launches: list[dict[str, Any]], reentrant: bool
) -> None:
    layer = layers(dropout=0.4)[1]
    x, dy = torch.randn(B, L, E), torch.randn(B, L, E)

    def run(call: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        torch.manual_seed(5)
        layer.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf).backward(dy)
        return [leaf.grad, *(p.grad for p in layer.parameters())]

    expected = run(layer)
    made = run(lambda leaf: checkpoint(layer, leaf, use_reentrant=reentrant))
    torch.testing.assert_close(made, expected)
    assert len(launches) == 2 + 4


def _hook_on(name: str) -> Callable[[nn.Module], object]:
    return lambda layer: getattr(layer, name).register_forward_hook(lambda *_: None)


def _replace(name: str, module: nn.Module) -> Callable[[nn.Module], object]:
    return lambda layer: setattr(layer, name, module)


class LoudLinear(nn.Linear):
    """A linear map of the user's."""


@pytest.mark.parametrize(
    ("change", "fused"),
    [
        (_hook_on("norm1"), 1),
        (_hook_on("dropout2"), 1),
        (_hook_on("norm2"), 1),
        (_replace("norm1", nn.Identity()), 1),
        (_replace("dropout1", nn.Dropout1d(0.0)), 1),
        (_hook_on("linear2"), 2),
        (_replace("linear2", LoudLinear(48, E)), 2),
        (_replace("norm1", nn.LayerNorm(E, elementwise_affine=False)), 2),
        (_replace("norm1", nn.LayerNorm((L, E))), 1),
        (lambda layer: setattr(layer, "_ff_block", lambda x: 2 * x), 0),
    ],
)
def test_whatever_listens_or_differs_is_called(
    launches: list[dict[str, Any]], change: Callable[[nn.Module], object], fused: int
) -> None:
    torchs, ours = layers()
    change(ours)
    for name, module in ours.named_children():
        setattr(torchs, name, copy.deepcopy(module))
    torchs.__dict__.update({k: v for k, v in ours.__dict__.items() if k == "_ff_block"})
    x = torch.randn(B, L, E)
    torch.testing.assert_close(ours(x), torchs(x), rtol=1e-4, atol=1e-5)
    assert len(launches) == fused


def test_hooks_see_what_torch_shows_them(launches: list[dict[str, Any]]) -> None:
    torchs, ours = layers()
    x = torch.randn(B, L, E)
    seen: list[list[torch.dtype]] = []
    for layer in (torchs, ours):
        types: list[torch.dtype] = []
        layer.linear1.register_forward_pre_hook(lambda _, args, t=types: t.append(args[0].dtype))
        layer.linear2.register_forward_hook(lambda _, args, y, t=types: t.append(y.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            layer(x)
        seen.append(types)
    assert seen[0] == seen[1] == [torch.float32, torch.bfloat16]
    assert launches


def test_small_sums_and_other_devices_are_left_to_the_modules(
    launches: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    torchs, ours = layers()
    x = torch.randn(B, L, E)
    monkeypatch.setattr(call, "LEAST_ELEMENTS", B * L * E + 1)
    torch.testing.assert_close(ours(x), torchs(x))
    monkeypatch.setattr(call, "make_configuration", call.Configuration)
    monkeypatch.setattr(call, "LEAST_ELEMENTS", 0)
    torch.testing.assert_close(ours(x), torchs(x))
    assert not launches
    reason = residual_norm.why_not_covered(x, None, x, None, None, 0.0)
    assert reason == "the tensors are on cpu, and the kernels are for CUDA"


@pytest.mark.parametrize("norm_first", [True, False])
def test_layers_compile_as_one_graph(launches: list[dict[str, Any]], norm_first: bool) -> None:
    torchs, ours = layers(norm_first=norm_first)
    torch._dynamo.reset()
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    x, dy = torch.randn(B, L, E), torch.randn(B, L, E)
    expected = gradients(torchs, x, dy)
    leaf = x.clone().requires_grad_()
    y = compiled(leaf)
    found = torch.autograd.grad(y, [leaf, *ours.parameters()], dy)
    for one, other in zip([y, *found], [expected[0], *expected[1]], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not launches  # the compiler fuses these itself
