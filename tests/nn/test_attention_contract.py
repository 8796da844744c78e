"""What torch's attention lets a caller do around a call: masks filled anew, views, tracing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfai
from hfai.kernels.attention import Masking
from hfai.kernels.mha import call, dispatch, masks, traced, weights
from hfai.kernels.mha.call import Options
from hfai.nn import to_hfai

E, H, B, L = 32, 4, 3, 8


@pytest.fixture(autouse=True)
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send CPU tensors the way of CUDA ones."""
    monkeypatch.setattr(call, "also_on_cpu", True)
    monkeypatch.setattr(dispatch, "LEAST_WORK_IN_INFERENCE", 0)
    monkeypatch.setattr(dispatch, "LEAST_WORK_WITHOUT_WEIGHTS", 0)
    monkeypatch.setattr(dispatch, "INSTEAD_OF_ONE_OPERATOR", True)


def pair(**keywords: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    torchs = nn.MultiheadAttention(E, H, **keywords)
    return torchs, to_hfai(copy.deepcopy(torchs))


def options(**given: Any) -> Options:
    return Options(None, True, None, True, False)._replace(**given)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize("kind", ["bool padding", "float padding", "bool", "float"])
def test_a_mask_may_be_filled_anew_before_backward(kind: str, need_weights: bool) -> None:
    if kind == "float" and not need_weights:
        return  # torch keeps the caller's own there
    torchs, ours = pair(batch_first=True)
    shape = (B, L) if "padding" in kind else (L, L)
    found = []
    for module in (torchs, ours):
        module.zero_grad()
        mask = torch.zeros(shape) if "float" in kind else torch.zeros(shape, dtype=torch.bool)
        mask[:, 3] = -2.0 if "float" in kind else True
        name = "key_padding_mask" if "padding" in kind else "attn_mask"
        x = torch.linspace(-1, 1, B * L * E).view(B, L, E).requires_grad_()
        y = module(x, x, x, need_weights=need_weights, **{name: mask})[0]
        mask.fill_(0 if "float" in kind else False)
        y.square().sum().backward()
        assert x.grad is not None
        found.append(x.grad)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_a_mask_made_under_inference_mode_serves_in_training() -> None:
    _, ours = pair(batch_first=True)
    with torch.inference_mode():
        mask = torch.ones(L, L, dtype=torch.bool).triu(1)
    x = torch.randn(B, L, E, requires_grad=True)
    y, _ = ours(x, x, x, attn_mask=mask)
    y.sum().backward()
    assert x.grad is not None


def test_outputs_may_be_viewed_where_torchs_may() -> None:
    torchs, ours = pair()
    x = torch.randn(B, L, E).transpose(0, 1)
    expected, y = torchs(x, x, x)[0], ours(x, x, x)[0]
    torch.testing.assert_close(y.view(-1, E), expected.view(-1, E), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "mask",
    [
        torch.randn(77, 77)[:64, :64],
        torch.randn(64, 65)[:, 1:],
        torch.randn(64 * 64 + 1)[1:].view(64, 64),
    ],
    ids=["part of a longer one", "columns from the second on", "one element into its buffer"],
)
def test_biases_have_aligned_rows_whatever_the_mask_is_a_part_of(mask: Tensor) -> None:
    q = torch.randn(2, 64, 4, 8)
    bias = masks.as_bias(Masking(attn_mask=mask), q, q)
    assert bias is not None
    assert bias.data_ptr() % 16 == 0
    assert all(step % masks.ALIGNMENT == 0 for step in bias.stride()[:-1])
    torch.testing.assert_close(bias[0, 0], mask)


def test_heads_are_looked_at_in_the_type_that_autocast_makes() -> None:
    assert dispatch.why_not_head(60, torch.float32) is None
    assert dispatch.why_not_head(60, torch.bfloat16) is not None
    module = to_hfai(nn.MultiheadAttention(48, 4, batch_first=True))  # heads of 12
    x = torch.randn(2, 8, 48)
    assert call.why_not_covered(module) is None
    assert call.attend(module, x, x, x, options()) is None  # on the CPU, as if in half precision


def test_weights_come_right_where_all_fused_operators_are_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(weights, "_kernel_covers", lambda q, k: True)
    torchs, ours = pair(batch_first=True)
    x = torch.randn(B, L, E, requires_grad=True)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        expected, found = torchs(x, x, x), ours(x, x, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_nested_tensors_are_torchs() -> None:
    torchs, ours = pair(batch_first=True)
    x = torch.nested.nested_tensor([torch.randn(5, E), torch.randn(3, E)])
    torchs.eval()
    ours.eval()
    with torch.no_grad():
        expected = torchs(x, x, x, need_weights=False)[0]
        found = ours(x, x, x, need_weights=False)[0]
    for one, other in zip(found.unbind(), expected.unbind(), strict=True):
        torch.testing.assert_close(one, other)


class Latents(nn.Module):
    """Attends from a buffer, so that torch.fx records no query."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(E, H, batch_first=True)
        self.layer = nn.TransformerDecoderLayer(E, H, 48, batch_first=True, dropout=0.0)
        self.register_buffer("latents", torch.randn(B, 4, E))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(self.attention(self.latents, x, x)[0], x)
        return self.layer(self.latents, y)  # type: ignore[no-any-return]


def test_fx_records_layers_whose_first_argument_is_a_buffer() -> None:
    torchs = Latents()
    ours = to_hfai(copy.deepcopy(torchs))
    x = torch.randn(B, L, E)
    graph = torch.fx.symbolic_trace(ours)
    assert [node.op for node in graph.graph.nodes].count("call_module") == 3
    torch.testing.assert_close(graph(x), torchs(x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("batch_first", [True, False])
def test_batches_that_do_not_fit_are_torchs_under_the_compiler_too(batch_first: bool) -> None:
    _, ours = pair(batch_first=batch_first)
    query, key = torch.randn(2, L, E), torch.randn(1, L, E)
    if not batch_first:
        query, key = query.transpose(0, 1), key.transpose(0, 1)
    assert traced.attend(ours, query, key, key, options()) is None
    assert traced.attend(ours, query, query, query, options()) is not None


@pytest.mark.parametrize("mask", [torch.ones(L, L, dtype=torch.int64), torch.ones(L - 1, L)])
def test_masks_that_torch_refuses_are_refused_with_the_causal_hint_too(mask: Tensor) -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(B, L, E)
    given = options(need_weights=False, attn_mask=mask, is_causal=True)
    assert call.attend(ours, x, x, x, given) is None


def test_a_packed_encoder_calls_sublayers_that_are_not_torchs() -> None:
    class Half(nn.TransformerEncoderLayer):
        def _sa_block(self, x: Tensor, *arguments: Any, **keywords: Any) -> Tensor:
            return x / 2

    torchs = nn.TransformerEncoder(
        Half(E, H, 48, dropout=0.0, batch_first=True), 2, enable_nested_tensor=False
    )
    ours = to_hfai(copy.deepcopy(torchs))
    ours.packed = True
    x, padding = torch.randn(B, L, E), torch.zeros(B, L, dtype=torch.bool)
    padding[1, 5:] = True
    expected = torchs(x, src_key_padding_mask=padding)
    torch.testing.assert_close(ours(x, src_key_padding_mask=padding), expected)


def test_a_packed_encoder_follows_the_limits_of_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = nn.TransformerEncoderLayer(E, H, 48, dropout=0.0, batch_first=True)
    ours = to_hfai(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False))
    ours.packed = True
    x, padding = torch.randn(B, L, E), torch.zeros(B, L, dtype=torch.bool)
    padding[1, 5:] = True
    assert not ours(x, src_key_padding_mask=padding)[1, 5:].any()
    monkeypatch.setattr(dispatch, "LONGEST", L - 1)
    assert ours(x, src_key_padding_mask=padding)[1, 5:].all()  # not left out


def test_layers_without_parameters_of_their_own_can_be_explained(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    layer = hfai.nn.TransformerEncoderLayer(E, H, 48)
    layer.linear1 = nn.Identity()
    assert layer.explain_path().taken == "torch"


def test_an_input_changed_in_place_is_refused_in_backward_as_the_docs_say() -> None:
    _, ours = pair(batch_first=True)
    x = torch.randn(B, L, E, requires_grad=True) * 1.0
    x += ours(x, x, x)[0]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        x.sum().backward()


@pytest.mark.filterwarnings("ignore:`torch.jit.*` is deprecated:DeprecationWarning")
def test_scripting_leaves_the_model_as_it_is() -> None:
    torchs = nn.Transformer(
        E, H, num_encoder_layers=1, num_decoder_layers=1, dim_feedforward=48, dropout=0.0
    )
    ours = to_hfai(copy.deepcopy(torchs))
    before = [(id(module), type(module)) for module in ours.modules()]
    scripted = torch.jit.script(ours)
    assert [(id(module), type(module)) for module in ours.modules()] == before
    source, target = torch.randn(L, B, E), torch.randn(L, B, E)
    torch.testing.assert_close(
        scripted(source, target), torchs(source, target), rtol=1e-4, atol=1e-5
    )
    attention = torch.jit.script(ours.encoder.layers[0].self_attn)
    assert attention(source, source, source)[0].shape == source.shape
