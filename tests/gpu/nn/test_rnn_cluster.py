"""The cluster kernels on a GPU: as accurate as torch's, the same bits each time, and no hang."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import hfai
from hfai.kernels.rnn import call, status
from hfai.kernels.rnn.cluster_plan import ClusterPlan
from hfai.nn import to_hfai
from hfai.nn.rnn import _stack
from tests.gpu.nn.test_rnn import (
    BF16,
    CUDA,
    FP16,
    FP32,
    assert_as_accurate,
    layers,
    results,
)
from tests.kernels.rnn.by_hand import clusters_where_they_fit
from tests.nn.operator_cases import assert_same_bits

__all__ = ["clusters_where_they_fit"]

pytestmark = pytest.mark.usefixtures("clusters_where_they_fit")


@pytest.fixture(autouse=True)
def _nothing_gives_up() -> Iterator[None]:
    """Whatever a test launches must have ended by itself."""
    if torch.cuda.get_device_capability()[0] < 9:
        pytest.skip("this device has no clusters")
    yield
    torch.cuda.synchronize()
    status.raise_if_lost(torch.cuda.current_device())


def plan_of(layer: nn.Module, dtype: torch.dtype, batch: int, steps: int) -> ClusterPlan:
    configuration = call.configure(_stack(layer), 0, dtype, batch, steps)  # type: ignore[arg-type]
    assert configuration is not None
    assert isinstance(configuration.plan, ClusterPlan)
    return configuration.plan


@pytest.mark.parametrize(
    ("kind", "hidden", "batch", "dtype", "options"),
    [
        ("LSTM", 1, 1, FP32, {}),
        ("LSTM", 20, 3, FP32, {}),
        ("LSTM", 64, 9, FP32, {"num_layers": 2, "bidirectional": True}),
        ("LSTM", 128, 4, FP32, {}),
        ("LSTM", 96, 33, BF16, {"bidirectional": True}),
        ("LSTM", 256, 8, FP16, {}),
        ("GRU", 50, 9, FP32, {}),
        ("GRU", 128, 4, FP16, {"bias": False}),
        ("GRU", 200, 17, BF16, {}),
        ("RNN", 65, 9, FP32, {"bidirectional": True}),
        ("RNN", 128, 4, BF16, {}),
    ],
)
@pytest.mark.parametrize("tf32", [False, True])
def test_errors_are_at_most_one_and_a_half_times_torchs(
    kind: str, hidden: int, batch: int, dtype: torch.dtype, options: dict[str, Any], tf32: bool
) -> None:
    if not tf32 and dtype != FP32:
        pytest.skip("the switch is for fp32")
    ours, torchs, double = layers(kind, hidden, dtype, **options)
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=tf32):
        plan_of(ours, dtype, batch, 40)
    x = torch.randn(40, batch, hidden, device=CUDA).to(dtype)
    assert_as_accurate(ours, torchs, double, x, tf32)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_sequences_of_different_lengths(kind: str) -> None:
    ours, _, double = layers(kind, 72, FP16, bidirectional=True)
    plan_of(ours, FP16, 10, 30)
    lengths = [30, 30, 29, 17, 16, 9, 9, 3, 1, 1]
    x = torch.randn(30, 10, 72, device=CUDA, dtype=FP16)
    made = []
    for layer, dtype in ((ours, FP16), (double, torch.float64)):
        given = x.to(dtype).requires_grad_()
        packed, hidden = layer(pack_padded_sequence(given, lengths))
        hn = hidden[0] if isinstance(hidden, tuple) else hidden
        loss = packed.data.float().square().sum() + hn.float().sum()
        made.append([packed.data, hn, *torch.autograd.grad(loss, [given, *layer.parameters()])])
    for one, expected in zip(*made, strict=True):
        error = (one.double() - expected.double()).norm() / expected.double().norm()
        assert error <= 5e-3


@pytest.mark.parametrize(("kind", "dtype"), [("LSTM", BF16), ("GRU", FP32), ("RNN", FP16)])
def test_more_clusters_than_the_device_holds_give_the_bits_of_few(
    kind: str, dtype: torch.dtype
) -> None:
    ours, _, _ = layers(kind, 160, dtype)
    x = torch.randn(32, 1600, 160, device=CUDA).to(dtype)
    plan_of(ours, dtype, 1600, 32)
    with torch.no_grad():
        assert_same_bits(ours(x)[0][:, 800:840], ours(x[:, 800:840].contiguous())[0])


def test_the_same_bits_beside_other_work() -> None:
    other = torch.cuda.Stream()
    noise = torch.randn(2048, 2048, device=CUDA)
    for kind, hidden, dtype in (("LSTM", 128, BF16), ("GRU", 64, FP32), ("LSTM", 256, FP16)):
        ours, _, _ = layers(kind, hidden, dtype, bidirectional=True)
        x = torch.randn(100, 20, hidden, device=CUDA).to(dtype)
        plan_of(ours, dtype, 20, 100)
        first = results(ours, x)
        for _ in range(20):
            with torch.cuda.stream(other):
                noise = torch.tanh(noise @ noise)
            assert_same_bits(results(ours, x), first)


def test_a_captured_graph_replays() -> None:
    ours, _, _ = layers("LSTM", 96, BF16)
    x = torch.randn(40, 8, 96, device=CUDA, dtype=BF16)
    plan_of(ours, BF16, 8, 40)
    with torch.no_grad():
        expected = ours(x)[0]
        static = torch.zeros_like(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = ours(static)[0]
        static.copy_(x)
        for _ in range(3):
            graph.replay()
            assert_same_bits(y, expected)


def test_explain_says_how_the_layer_runs() -> None:
    layer = to_hfai(nn.LSTM(128, 128)).to(CUDA, BF16)
    (path,) = hfai.explain(layer)
    plan = plan_of(layer, BF16, 1, 40)
    assert path.path == "hfai"
    assert plan.where in path.reason


def test_weights_that_do_not_lie_on_vectors_give_the_same_bits() -> None:
    ours, _, _ = layers("LSTM", 64, FP16)
    x = torch.randn(40, 8, 64, device=CUDA, dtype=FP16)
    plan_of(ours, FP16, 8, 40)
    with torch.no_grad():
        expected = ours(x)[0]
        whole = torch.empty(4 * 64 * 64 + 1, device=CUDA, dtype=FP16)
        shifted: Tensor = whole[1:].view(256, 64)
        shifted.copy_(ours.weight_hh_l0)
        ours.weight_hh_l0 = nn.Parameter(shifted)
        assert ours.weight_hh_l0.data_ptr() % 16 != 0
        assert_same_bits(ours(x)[0], expected)
