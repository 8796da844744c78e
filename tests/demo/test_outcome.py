"""What a run came to: which checks it makes, and when they fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hfai.demo.check import RoundTrip
from hfai.demo.compare import Comparison, Side
from hfai.demo.corpus import Corpus
from hfai.demo.figures import collect_figures, to_json
from hfai.demo.outcome import Outcome, Swap
from hfai.demo.settings import Settings
from hfai.nn import to_torch
from hfai.nn.registry import OPERATORS


@pytest.fixture
def outcome(settings: Settings) -> Outcome:
    model = settings.make_model()
    return Outcome(
        settings=settings,
        losses=[5.0, 4.0],
        training_seconds=0.5,
        resumed_from=0,
        unigram=3.1,
        swap=Swap.of(model),
    )


def compared(torch_loss: float, hfai_loss: float) -> Comparison:
    return Comparison(1, Side([100.0, 200.0], torch_loss), Side([150.0, 200.0], hfai_loss))


def test_the_swap_counts_what_changed_class_and_says_which_path_it_takes(
    settings: Settings,
) -> None:
    model = settings.make_model()
    known = sum(type(module) in OPERATORS for module in model.modules())
    swap = Swap.of(model)
    assert sum(swap.swapped.values()) == known > 0
    assert sum(path.count for path in swap.paths) >= known
    assert all(path.reason for path in swap.paths)
    assert Swap.of(model).swapped == {}
    assert Swap.of(to_torch(model)).swapped == swap.swapped


def test_figures_of_the_training(outcome: Outcome) -> None:
    assert outcome.last_loss == 4.5
    assert outcome.training_tokens_per_second == 2 * 4 * 16 / 0.5
    assert outcome.passed
    assert outcome.checks() == []


def test_a_run_without_a_step_has_no_figures_and_no_error(outcome: Outcome) -> None:
    outcome.losses = []
    assert outcome.last_loss is None
    assert outcome.training_tokens_per_second is None


def test_the_ratio_is_the_median_of_the_pairs(outcome: Outcome) -> None:
    assert compared(2.0, 2.0).ratios == [1.5, 1.0]
    assert compared(2.0, 2.0).ratio == 1.25


@pytest.mark.parametrize(
    ("precision", "hfai_loss", "passed"),
    [("fp32", 2.0001, True), ("fp32", 2.001, False), ("bf16", 2.001, True), ("bf16", 2.1, False)],
)
def test_losses_of_both_sides_must_agree(
    outcome: Outcome, precision: str, hfai_loss: float, passed: bool
) -> None:
    outcome.settings = replace(outcome.settings, precision=precision)
    outcome.comparison = compared(2.0, hfai_loss)
    assert outcome.passed == passed
    outcome.comparison = compared(2.0, float("nan"))
    assert not outcome.passed


def test_a_failed_way_back_and_a_divergence_fail_the_run(outcome: Outcome) -> None:
    outcome.round_trip = RoundTrip(2.0, 2.1)
    assert not outcome.passed
    outcome.round_trip = RoundTrip(2.0, 2.0)
    assert outcome.passed
    outcome.failure = "the loss of step 3 is nan"
    assert not outcome.passed


def test_figures_are_strict_json_even_for_what_is_no_number(outcome: Outcome) -> None:
    outcome.losses.append(float("nan"))
    outcome.comparison = compared(2.0, float("inf"))
    corpus = Corpus(Path("a.ffr"), Path("b.ffr"), 90, 10, np.zeros(256, np.int64), "digest")
    figures = collect_figures(outcome, corpus, torch.device("cpu"), "hfai demo")
    read = json.loads(to_json(figures))
    assert read["training"]["losses"] == [5.0, 4.0, None]
    assert read["comparison"]["hfai"]["held_out_loss"] is None
    assert read["versions"]["torch"] == torch.__version__
    assert read["machine"]["cores"] >= 1
    assert read["checks"][0]["passed"] is False
