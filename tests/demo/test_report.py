"""What a run says at its end."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from hfai.demo.check import RoundTrip
from hfai.demo.compare import Comparison, Side
from hfai.demo.outcome import Outcome, PathCount, Swap
from hfai.demo.report import print_files, print_report
from hfai.demo.settings import Settings

TORCH_PATH = PathCount("LayerNorm", "torch", "no CUDA device", 6)
HFAI_PATH = PathCount("LayerNorm", "hfai", "CUDA kernels", 6)


@pytest.fixture
def outcome(settings: Settings) -> Outcome:
    return Outcome(
        settings=replace(settings, steps=2),
        losses=[5.5, 2.5],
        training_seconds=0.5,
        resumed_from=0,
        unigram=3.1,
        swap=Swap({"LayerNorm": 6}, (TORCH_PATH,)),
        peak_memory=100 * 2**20,
        comparison=Comparison(4, Side([1000.0, 2000.0, 3000.0], 2.4), Side([1500.0] * 3, 2.4)),
        round_trip=RoundTrip(2.4, 2.4),
    )


def report(outcome: Outcome, device: str = "cpu") -> str:
    file = io.StringIO()
    print_report(Console(file=file, width=100), outcome, torch.device(device))
    return file.getvalue()


def test_a_finished_run_says_it_all(outcome: Outcome) -> None:
    shown = report(outcome)
    assert "2 of 2 steps in 0:00, 256 tokens/s" in shown
    assert "from 5.500 to 4.000 nats a byte (guessing by byte frequency: 3.100)" in shown
    (speeds,) = [line for line in shown.splitlines() if "tokens/s, median of 3" in line]
    assert [cell.strip() for cell in speeds.split("│")[2:4]] == ["2,000", "1,500"]
    assert "0.750  [0.50, 1.50]" in speeds
    assert "100 MiB" in shown
    assert "swapped: 6 LayerNorm" in shown
    assert "6 LayerNorm on torch's path: no CUDA device" in shown
    assert shown.count("ok: ") == 2


def test_it_says_that_both_sides_are_one_only_where_they_are(outcome: Outcome) -> None:
    assert "both sides ran torch's code" in report(outcome)
    outcome.swap = Swap({"LayerNorm": 6}, (HFAI_PATH,))
    assert "both sides ran torch's code" not in report(outcome)


def test_on_a_gpu_each_side_has_its_peak_memory(outcome: Outcome) -> None:
    comparison = outcome.comparison
    assert comparison is not None
    comparison.torch.peak_memory, comparison.hfai.peak_memory = 300 * 2**20, 200 * 2**20
    (memory,) = [line for line in report(outcome, "cuda").splitlines() if "peak GPU" in line]
    assert [cell.strip() for cell in memory.split("│")[2:4]] == ["300 MiB", "200 MiB"]


def test_a_failed_check_is_called_so(outcome: Outcome) -> None:
    outcome.round_trip = RoundTrip(2.4, 2.5)
    assert "FAILED: the saved model gives the same loss in plain torch" in report(outcome)


def test_one_pair_of_blocks_is_enough_for_a_table(outcome: Outcome) -> None:
    outcome.comparison = Comparison(1, Side([1000.0]), Side([1100.0]))
    shown = report(outcome)
    assert "1.100  [1.10, 1.10]" in shown
    assert shown.count("not measured") == 2


def test_a_stopped_run_says_what_is_missing_and_how_to_go_on(
    outcome: Outcome, tmp_path: Path
) -> None:
    outcome.losses, outcome.interrupted = [], True
    outcome.comparison = outcome.round_trip = None
    shown = report(outcome)
    assert "no step was finished" in shown
    assert "not measured, the run was stopped before" in shown
    file = io.StringIO()
    (tmp_path / "model.pt").write_bytes(b"of an earlier run")
    print_files(Console(file=file, width=100), tmp_path, outcome, has_curve=False)
    first, second = file.getvalue().splitlines()
    assert first == f"written: figures.json, resume in {tmp_path}"
    assert second == "stopped after step 0 of 2: add --resume to go on"
