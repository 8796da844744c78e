"""The LSTM language model: its loss, its causality, and its way through to_hfai and back."""

from __future__ import annotations

import math

import pytest
import torch

from hfai.models import LSTMLM, LSTMConfig, lstm_LM
from hfai.nn import LSTM, to_hfai, to_torch


@pytest.fixture
def model() -> LSTMLM:
    return LSTMLM(LSTMConfig(20, embedding_size=6, hidden_size=8, layers=2)).eval()


def test_a_new_model_guesses_evenly(model: LSTMLM) -> None:
    ids = torch.randint(20, (4, 30))
    output = model(ids, labels=ids)
    assert output.logits.shape == (4, 30, 20)
    assert output.loss is not None
    assert output.loss.item() == pytest.approx(math.log(20), abs=0.2)
    assert model(ids).loss is None


def test_what_comes_later_changes_nothing_before_it(model: LSTMLM) -> None:
    ids = torch.randint(20, (2, 10))
    changed = ids.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 20
    before, after = model(ids).logits, model(changed).logits
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.equal(before[:, 6:], after[:, 6:])


def test_positions_without_a_label_do_not_count(model: LSTMLM) -> None:
    ids = torch.randint(20, (2, 10))
    labels = ids.roll(-1, 1)
    labels[:, 5:] = -100
    whole, part = model(ids, labels=labels).loss, model(ids[:, :5], labels=labels[:, :5]).loss
    torch.testing.assert_close(whole, part)


def test_its_lstm_is_swapped_and_swapped_back(model: LSTMLM) -> None:
    assert type(to_hfai(model).lstm) is LSTM
    assert type(to_torch(model).lstm) is torch.nn.LSTM


def test_sizes_below_one_are_refused_in_words() -> None:
    assert lstm_LM(264).config.hidden_size == 512
    with pytest.raises(ValueError, match="layers must be at least 1, not 0"):
        LSTMConfig(20, layers=0)
