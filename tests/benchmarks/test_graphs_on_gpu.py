"""Kernel times by graph replay; needs a GPU."""

from __future__ import annotations

import pytest
import torch
from benchmarks.harness import graphs
from benchmarks.harness.ceiling import Ceilings
from benchmarks.harness.run import GRID, QUICK, measure
from benchmarks.operators import OPERATORS
from benchmarks.operators.norm import norm_case
from torch import Tensor

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="captures CUDA graphs: needs an NVIDIA GPU"
)
GPU = torch.device("cuda", 0)
CEILINGS = Ceilings(4e12, {"fp32": 5e13})


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_both_passes_of_every_implementation_are_captured(name: str) -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        result = measure(
            OPERATORS[name](),
            norm_case((512, 1024), torch.bfloat16),
            GPU,
            CEILINGS,
            GRID,
            seed=3,
        )
    for row in result.rows:
        if row.status == "absent":
            continue
        assert (row.name, row.status, row.reason) == (row.name, "ok", "")
        assert {what: s.method for what, s in row.kernel.items()} == {
            "forward": "graph",
            "backward": "graph",
        }
        assert all(0.0005 < s.median_ms < 1 for s in row.kernel.values())


def test_whole_calls_and_peak_memory_are_measured() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):
        case = norm_case((256, 512), torch.float32)
        result = measure(OPERATORS["layer_norm"](), case, GPU, CEILINGS, QUICK, seed=4)
    torchs = result.row("torch")
    assert torchs is not None
    assert set(torchs.call) == {"no_grad", "forward", "both"}
    assert torchs.peak_memory_bytes is not None
    assert torchs.peak_memory_bytes >= 2 * case.elements * 4, "the output and dx at least"


def test_a_forward_that_synchronizes_falls_back_to_events() -> None:
    x = torch.randn(64, 64, device="cuda", requires_grad=True)

    def call() -> Tensor:
        return x * x.detach().sum().item()

    with torch.cuda.stream(torch.cuda.Stream()):
        captured = graphs.forward_pass([call, call], graphs.Pool(GPU))
        assert captured.method == "events"
        assert captured.reason
        flush = graphs.Flush(GPU)
        events = captured.timer(flush)()
        torch.cuda.synchronize()
        assert captured.milliseconds(events) > 0


def test_a_pool_outlives_its_graphs() -> None:
    x = torch.randn(64, 64, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        pool = graphs.Pool(GPU)
        for _ in range(3):
            captured = graphs.forward_pass([lambda: x * 2], pool)
            assert captured.method == "graph", captured.reason
            del captured


def test_a_graph_that_writes_only_part_of_its_output_is_refused() -> None:
    x = torch.randn(64, 64, device="cuda")

    def call() -> Tensor:
        y = torch.empty_like(x)
        y[:32].copy_(x[:32])
        return y

    with (
        torch.cuda.stream(torch.cuda.Stream()),
        pytest.raises(RuntimeError, match="left elements of an output unwritten"),
    ):
        graphs.forward_pass([call], graphs.Pool(GPU))
