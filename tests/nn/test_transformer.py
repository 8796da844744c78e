"""The transformer layers: ours inside, parts called in evaluation, padded rows left out."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfai.nn
from hfai.kernels.mha import call, dispatch
from hfai.nn import to_hfai, to_torch, transformer
from tests.nn.operator_cases import assert_same_bits

E, H, B, L = 32, 4, 3, 8


@pytest.fixture
def fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send CPU tensors the way of CUDA ones, and small inputs the way of large ones."""
    monkeypatch.setattr(call, "also_on_cpu", True)
    monkeypatch.setattr(dispatch, "LEAST_WORK_IN_INFERENCE", 0)
    monkeypatch.setattr(dispatch, "LEAST_WORK_WITHOUT_WEIGHTS", 0)
    monkeypatch.setattr(dispatch, "INSTEAD_OF_ONE_OPERATOR", True)
    monkeypatch.setattr(transformer, "LEAST_WORK_IN_EVALUATION", 0)


def encoder_layer(**keywords: Any) -> nn.TransformerEncoderLayer:
    options = {"dim_feedforward": 48, "dropout": 0.0, "batch_first": True} | keywords
    return nn.TransformerEncoderLayer(E, H, **options)


def encoder(norm: bool = True, **keywords: Any) -> tuple[nn.Module, nn.Module]:
    """Return torch's encoder of two layers, and ours with the same parameters."""
    torchs = nn.TransformerEncoder(
        encoder_layer(**keywords), 2, nn.LayerNorm(E) if norm else None, enable_nested_tensor=False
    )
    for parameter in torchs.parameters():
        nn.init.uniform_(parameter, -0.3, 0.3)
    return torchs, to_hfai(copy.deepcopy(torchs))


def padding() -> Tensor:
    """Return padding at the end of each sequence but one."""
    lengths = torch.tensor([L, 2, 5])
    return torch.arange(L) >= lengths[:, None]


def operators(module: nn.Module, *inputs: Tensor, **options: Any) -> set[str]:
    """Return the names of the operators that a call runs."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(*inputs, **options)
    return {event.name for event in profile.events()}


@pytest.mark.parametrize("name", ["TransformerEncoderLayer", "TransformerDecoderLayer"])
def test_a_layer_built_by_our_name_has_our_parts(name: str) -> None:
    layer = getattr(hfai.nn, name)(E, H)
    assert type(layer.self_attn) is hfai.nn.MultiheadAttention
    assert type(layer.norm1) is hfai.nn.LayerNorm
    to_torch(layer)
    assert type(layer) is getattr(nn, name)
    assert type(layer.self_attn) is nn.MultiheadAttention


@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("mask", ["none", "padding", "float padding", "bool", "causal"])
def test_results_are_torchs_in_training_and_in_evaluation(
    fused: None, mask: str, batch_first: bool, norm_first: bool
) -> None:
    torchs = encoder_layer(batch_first=batch_first, norm_first=norm_first)
    ours = to_hfai(copy.deepcopy(torchs))
    options: dict[str, Any] = {
        "none": {},
        "padding": {"src_key_padding_mask": padding()},
        "float padding": {"src_key_padding_mask": torch.where(padding(), -math.inf, 0.0)},
        "bool": {"src_mask": torch.ones(L, L, dtype=torch.bool).tril(-2)},
        "causal": {"src_mask": torch.ones(L, L, dtype=torch.bool).triu(1), "is_causal": True},
    }[mask]
    x = torch.randn(B, L, E) if batch_first else torch.randn(L, B, E)
    for training in (True, False):
        torchs.train(training), ours.train(training)
        gradients = []
        for module in (torchs, ours):
            leaf = x.clone().requires_grad_()
            y = module(leaf, **options)
            gradients.append((y, *torch.autograd.grad(y.cos().sum(), leaf)))
        for one, other in zip(*gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        with torch.no_grad():
            torch.testing.assert_close(
                ours(x, **options), torchs(x, **options), rtol=1e-4, atol=1e-5
            )


def test_in_evaluation_the_parts_are_called_where_torch_reads_their_weights(fused: None) -> None:
    torchs = encoder_layer().eval()
    x = torch.randn(B, L, E)
    whole = "aten::_transformer_encoder_layer_fwd"
    with torch.no_grad():
        assert whole in operators(torchs, x)
        assert whole not in operators(to_hfai(copy.deepcopy(torchs)), x)


def test_evaluation_is_torchs_one_operator(fused: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "LEAST_WORK_IN_EVALUATION", math.inf)
    layer = to_hfai(encoder_layer()).eval()
    with torch.no_grad():
        found = operators(layer, torch.randn(B, L, E))
    assert "aten::_transformer_encoder_layer_fwd" in found


def test_masks_of_two_kinds_warn_as_torch_does(fused: None) -> None:
    layer = to_hfai(encoder_layer())
    x = torch.randn(B, L, E)
    with pytest.warns(UserWarning, match="mismatched src_key_padding_mask and src_mask"):
        layer(x, torch.zeros(L, L), padding())


def test_an_encoder_with_nested_tensors_works_in_evaluation(fused: None) -> None:
    torchs = nn.TransformerEncoder(encoder_layer(), 2).eval()
    ours = to_hfai(copy.deepcopy(torchs))
    x, mask = torch.randn(B, L, E), padding()
    with torch.no_grad():
        expected = torchs(x, src_key_padding_mask=mask)
        found = ours(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[~mask], expected[~mask], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("flavour", ["on the CPU", "fused"])
@pytest.mark.parametrize("norm_first", [True, False])
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_gives_the_same_rows_and_gradients_without_padding(
    request: pytest.FixtureRequest, batch_first: bool, norm_first: bool, flavour: str
) -> None:
    if flavour == "fused":
        request.getfixturevalue("fused")
    torchs, ours = encoder(batch_first=batch_first, norm_first=norm_first)
    ours.packed = True  # type: ignore[assignment]
    mask = padding()
    counted = ~mask if batch_first else ~mask.t()
    x = torch.randn(*counted.shape, E)
    found = []
    for module in (torchs, ours):
        leaf = x.clone().requires_grad_()
        y = module(leaf, src_key_padding_mask=mask)
        loss = y[counted].cos().sum()
        gradients = torch.autograd.grad(loss, [leaf, *module.parameters()])
        found.append([y[counted], gradients[0][counted], *gradients[1:]])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    with torch.no_grad():
        y = ours.eval()(x, src_key_padding_mask=mask)
    assert not y[~counted].any()


def test_packed_works_on_as_many_rows_as_count() -> None:
    _, ours = encoder()
    ours.packed = True  # type: ignore[assignment]
    rows = []
    hook = nn.Module.register_forward_hook
    hook(ours.layers[0].linear1, lambda module, given, y: rows.append(given[0].shape))
    ours(torch.randn(B, L, E), src_key_padding_mask=padding())
    assert rows == [(int((~padding()).sum()), E)]


def test_packed_with_dropout_trains() -> None:
    _, ours = encoder(dropout=0.3)
    ours.packed = True  # type: ignore[assignment]
    ours(torch.randn(B, L, E), src_key_padding_mask=padding()).sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in ours.parameters())


def test_packed_takes_a_batch_in_which_a_sequence_is_all_padding() -> None:
    _, ours = encoder()
    ours.packed = True  # type: ignore[assignment]
    x = torch.randn(B, L, E)
    mask = padding()
    alone = ours(x, src_key_padding_mask=mask)
    mask[0] = True
    found = ours(x, src_key_padding_mask=mask)
    torch.testing.assert_close(found[1:], alone[1:])
    assert not found[0].any()
    assert not ours(x, src_key_padding_mask=torch.ones(B, L, dtype=torch.bool)).any()


@pytest.mark.parametrize("why", ["no mask", "a float mask", "a mask of scores", "a hook"])
def test_packed_leaves_to_torch_what_it_does_not_cover(why: str) -> None:
    torchs, ours = encoder()
    ours.packed = True  # type: ignore[assignment]
    x = torch.randn(B, L, E)
    options: dict[str, Any] = {"src_key_padding_mask": padding()}
    if why == "no mask":
        options = {}
    elif why == "a float mask":
        options = {"src_key_padding_mask": torch.randn(B, L)}
    elif why == "a mask of scores":
        options["mask"] = torch.ones(L, L, dtype=torch.bool).triu(1)
    else:
        for module in (torchs, ours):
            module.layers[0].self_attn.register_forward_hook(lambda *given: None)
    assert_same_bits(ours(x, **options), torchs(x, **options))


def test_being_packed_outlives_copies_and_the_swap() -> None:
    _, ours = encoder()
    assert ours.packed is False
    ours.packed = True  # type: ignore[assignment]
    assert copy.deepcopy(ours).packed is True
    assert to_hfai(to_torch(ours)).packed is True
