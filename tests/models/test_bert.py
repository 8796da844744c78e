"""BERT: the published sizes, the arithmetic of the head, the ways between torch and hfai."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hfai.models import BertConfig, BertMLM, bert_base_MLM, bert_large_MLM, bert_tiny_MLM
from hfai.nn import to_hfai, to_torch
from hfai.nn.registry import OPERATORS

VOCABULARY, LENGTH = 50, 16


def small_bert(dropout: float = 0.0, **sizes: float) -> BertMLM:
    config = BertConfig(
        VOCABULARY,
        LENGTH,
        layers=2,
        hidden_size=32,
        heads=4,
        feed_forward_size=64,
        dropout=dropout,
        **sizes,
    )
    return BertMLM(config)


@pytest.fixture
def input_ids(device: torch.device) -> Tensor:
    return torch.randint(VOCABULARY, (3, LENGTH), device=device)


@pytest.fixture
def labels(input_ids: Tensor) -> Tensor:
    chosen = torch.rand(input_ids.shape, device=input_ids.device) < 0.3
    return torch.where(chosen, input_ids, -100)


@pytest.mark.parametrize(
    ("make", "published", "hidden"),
    [(bert_base_MLM, 109_514_298, 768), (bert_large_MLM, 335_174_458, 1024)],
)
def test_published_sizes_but_for_the_two_segment_embeddings(
    make: Callable[..., BertMLM], published: int, hidden: int
) -> None:
    with torch.device("meta"):
        model = make(vocab_size=30522, max_length=512)
    assert sum(p.numel() for p in model.parameters()) == published - 2 * hidden


def test_sizes_of_the_three_models() -> None:
    with torch.device("meta"):
        models = [make(264, 64) for make in (bert_tiny_MLM, bert_base_MLM, bert_large_MLM)]
    configs = [model.config for model in models]
    assert [c.layers for c in configs] == [2, 12, 24]
    assert [c.hidden_size for c in configs] == [128, 768, 1024]
    assert [c.heads for c in configs] == [2, 12, 16]
    assert [c.feed_forward_size for c in configs] == [512, 3072, 4096]


def test_without_labels_logits_cover_all_positions(device: torch.device, input_ids: Tensor) -> None:
    output = small_bert().to(device)(input_ids)
    assert output.loss is None
    assert output.logits.shape == (3, LENGTH, VOCABULARY)


def test_with_labels_logits_are_those_of_the_labelled_positions_in_order(
    device: torch.device, input_ids: Tensor, labels: Tensor
) -> None:
    model = small_bert().to(device)
    loss, logits = model(input_ids, labels=labels)
    everywhere = model(input_ids).logits
    torch.testing.assert_close(logits, everywhere[labels != -100])
    expected = F.cross_entropy(everywhere.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(loss, expected)


def test_gradients_are_those_of_a_head_over_all_positions(
    device: torch.device, input_ids: Tensor, labels: Tensor
) -> None:
    model = small_bert().to(device)
    model(input_ids, labels=labels).loss.backward()
    ours = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    F.cross_entropy(model(input_ids).logits.flatten(0, 1), labels.flatten()).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, msg=lambda m, n=name: f"{n}: {m}")


def test_a_layer_is_the_published_one(device: torch.device) -> None:
    layer = small_bert(dropout=0.25).to(device).layers[0]
    with torch.no_grad():  # weights that are not at their simple initial values
        for parameter in layer.parameters():
            parameter.normal_(std=0.3)
    probabilities = [layer.dropout1.p, layer.dropout2.p, layer.self_attn.dropout, layer.dropout.p]
    assert probabilities == [0.25, 0.25, 0.25, 0.0]  # none between the two linear maps
    layer.eval()
    x = torch.randn(3, LENGTH, 32, device=device)
    padding = torch.arange(LENGTH, device=device) >= torch.tensor([[16], [9], [1]], device=device)
    attended, _ = layer.self_attn(x, x, x, key_padding_mask=padding, need_weights=False)
    inner = layer.norm1(x + attended)
    expected = layer.norm2(inner + layer.linear2(F.gelu(layer.linear1(inner))))
    made = layer(x, src_key_padding_mask=padding)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
def test_padding_has_no_say_in_what_other_tokens_become(
    device: torch.device, input_ids: Tensor, dtype: torch.dtype
) -> None:
    model = small_bert().to(device)
    mask = torch.ones(3, LENGTH, dtype=dtype, device=device)
    mask[:, 10:] = 0
    other_ids = input_ids.clone()
    other_ids[:, 10:] = (other_ids[:, 10:] + 1) % VOCABULARY
    logits = model(input_ids, mask).logits[:, :10]
    torch.testing.assert_close(logits, model(other_ids, mask).logits[:, :10])
    torch.testing.assert_close(logits, model(input_ids[:, :10]).logits)


def test_a_mask_of_ones_is_no_mask(device: torch.device, input_ids: Tensor) -> None:
    model = small_bert().to(device)
    mask = torch.ones_like(input_ids)
    torch.testing.assert_close(model(input_ids, mask).logits, model(input_ids).logits)


def test_no_labelled_position_costs_nothing_and_harms_nothing(
    device: torch.device, input_ids: Tensor
) -> None:
    model = small_bert().to(device)
    loss, logits = model(input_ids, labels=torch.full_like(input_ids, -100))
    assert loss.item() == 0.0
    assert logits.shape == (0, VOCABULARY)
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


def test_a_new_model_is_about_as_good_as_guessing(device: torch.device, input_ids: Tensor) -> None:
    loss = small_bert().to(device)(input_ids, labels=input_ids).loss
    assert loss.item() == pytest.approx(math.log(VOCABULARY), rel=0.05)


def test_new_weights_have_the_published_spread() -> None:
    model = bert_tiny_MLM(vocab_size=264, max_length=64)
    weights = {name: p for name, p in model.named_parameters() if p.ndim > 1}
    assert len(weights) == 2 + 2 * 4 + 1
    for name, weight in weights.items():
        assert weight.std().item() == pytest.approx(0.02, rel=0.05), name
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name


def test_output_matrix_is_the_token_embedding_and_stands_once_in_the_state_dict() -> None:
    state = small_bert().state_dict()
    matrices = [name for name, tensor in state.items() if tensor.shape == (VOCABULARY, 32)]
    assert matrices == ["token_embedding.weight"]


def test_all_that_can_be_swapped_is_swapped_and_comes_back(
    device: torch.device, input_ids: Tensor, labels: Tensor
) -> None:
    model = small_bert().to(device)
    before = [type(module) for module in model.modules()]
    loss = model(input_ids, labels=labels).loss
    to_hfai(model)
    assert not any(type(module) in OPERATORS for module in model.modules())
    assert sum(isinstance(module, nn.LayerNorm) for module in model.modules()) == 6
    torch.testing.assert_close(model(input_ids, labels=labels).loss, loss)
    to_torch(model)
    assert [type(module) for module in model.modules()] == before


def test_parameters_can_be_made_contiguous(
    device: torch.device, input_ids: Tensor, labels: Tensor
) -> None:
    model = small_bert().to(device)
    loss = model(input_ids, labels=labels).loss
    to_hfai(model, contiguous_param=True)
    torch.testing.assert_close(model(input_ids, labels=labels).loss, loss)


def test_bf16_autocast_keeps_the_loss_in_fp32(
    device: torch.device, input_ids: Tensor, labels: Tensor
) -> None:
    model = small_bert().to(device)
    expected = model(input_ids, labels=labels).loss
    with torch.autocast(device.type, dtype=torch.bfloat16):
        loss, logits = model(input_ids, labels=labels)
    assert (loss.dtype, logits.dtype) == (torch.float32, torch.bfloat16)
    torch.testing.assert_close(loss, expected, rtol=0.02, atol=0.0)


def test_training_fits_a_batch(device: torch.device, input_ids: Tensor, labels: Tensor) -> None:
    model = to_hfai(small_bert(dropout=0.1).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = model(input_ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]


def test_dynamo_traces_it(device: torch.device, input_ids: Tensor, labels: Tensor) -> None:
    model = small_bert().to(device)
    compiled = torch.compile(model, backend="eager")
    expected = model(input_ids, labels=labels)
    loss, logits = compiled(input_ids, labels=labels)
    torch.testing.assert_close(loss, expected.loss)
    torch.testing.assert_close(logits, expected.logits)


def test_errors_say_what_is_right() -> None:
    model = small_bert()
    ids = torch.zeros(2, LENGTH, dtype=torch.long)
    with pytest.raises(ValueError, match=r"at most max_length = 16, not \[2, 17\]"):
        model(torch.zeros(2, 17, dtype=torch.long))
    with pytest.raises(ValueError, match=r"\[batch, length\].*not \[16\]"):
        model(ids[0])
    with pytest.raises(ValueError, match=r"labels must have the shape.*\[2, 16\], not \[2, 4\]"):
        model(ids, labels=ids[:, :4])
    with pytest.raises(ValueError, match="attention_mask must have the shape"):
        model(ids, attention_mask=ids[:1])
    with pytest.raises(ValueError, match="hidden_size must be a multiple of heads, but 30"):
        BertConfig(VOCABULARY, LENGTH, hidden_size=30, heads=4)
    with pytest.raises(ValueError, match="vocab_size must be at least 1, not 0"):
        BertConfig(0, LENGTH)
