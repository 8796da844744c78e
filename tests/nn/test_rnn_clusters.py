"""Layers that run on clusters: the same module, the same gradients, and `hfai.explain` says so."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import hfai
from hfai.kernels.rnn import call
from hfai.kernels.rnn.cluster_plan import ClusterPlan
from hfai.nn import to_hfai
from hfai.nn.rnn import _stack
from tests.kernels.rnn.by_hand import (
    clusters_where_they_fit,
    every_size_is_ours,
    kernels_on_cpu,
)

__all__ = ["clusters_where_they_fit", "every_size_is_ours", "kernels_on_cpu"]


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_gradients_are_torchs(
    kind: str, kernels_on_cpu: list[str], clusters_where_they_fit: None
) -> None:
    torch.manual_seed(0)
    torchs: nn.Module = getattr(nn, kind)(11, 13, num_layers=2, bidirectional=True)
    ours = to_hfai(copy.deepcopy(torchs))
    x = torch.randn(7, 3, 11)
    configuration = call.configure(_stack(ours), -1, torch.float32, 3, 7)  # type: ignore[arg-type]
    assert configuration is not None
    assert isinstance(configuration.plan, ClusterPlan)
    results = []
    for layer in (ours, torchs):
        given = x.clone().requires_grad_()
        y = layer(given)[0]
        results.append([y, *torch.autograd.grad(y.square().sum(), [given, *layer.parameters()])])
    assert kernels_on_cpu == ["forward"] * 2 + ["backward"] * 2
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_explain_names_the_blocks(
    kernels_on_cpu: list[str], clusters_where_they_fit: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (path,) = hfai.explain(to_hfai(nn.LSTM(128, 128)))
    assert path.path == "hfai"
    assert "on clusters of" in path.reason
