"""A case from inputs to rows: what is wrong is not timed, what fails does not stop the others."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from benchmarks.harness.case import Case, Implementation, Inputs
from benchmarks.harness.ceiling import Ceilings
from benchmarks.harness.result import CaseResult, Row
from benchmarks.harness.run import MOST_ELEMENTS_ON_CPU, QUICK, measure
from benchmarks.harness.table import case_line, duration, print_tables, remarks
from benchmarks.harness.timing import summarise
from benchmarks.operators.layer_norm import LayerNorm
from benchmarks.operators.norm import norm_case
from rich.console import Console
from torch import Tensor

CPU = torch.device("cpu")
CEILINGS = Ceilings(1e10, {"fp32": 1e11})
BRIEF = replace(QUICK, call_budget_s=0.01)


class WithFaults(LayerNorm):
    """LayerNorm with three more implementations: one wrong, one that raises, one that is absent."""

    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Add them behind torch and ours."""
        torchs = super().implementations(case, device, grid)[0]

        def wrong(inputs: Inputs) -> Callable[[], Tensor]:
            call = torchs.bind(inputs)
            return lambda: call() * 1.001

        def raises(inputs: Inputs) -> Callable[[], Tensor]:
            raise RuntimeError("no kernel for this length\nand a long story about why")

        return [
            *super().implementations(case, device, grid),
            Implementation("wrong", wrong),
            Implementation("raises", raises),
            Implementation("missing", raises, absent="not installed"),
        ]


class LessAccurate(LayerNorm):
    """LayerNorm whose "hfai" computes in bf16 and back: right within fp32's tolerance it is not."""

    def implementations(
        self, case: Case, device: torch.device, grid: bool
    ) -> Sequence[Implementation]:
        """Replace ours."""
        torchs = super().implementations(case, device, grid)[0]

        def noisy(inputs: Inputs) -> Callable[[], Tensor]:
            call = torchs.bind(inputs)
            return lambda: call() * (1 + 1e-5)

        return [torchs, Implementation("hfai", noisy)]


def run(operator: LayerNorm, case: Case) -> CaseResult:
    """Measure a case on the CPU, briefly."""
    return measure(operator, case, CPU, CEILINGS, BRIEF, seed=1)


def test_a_wrong_implementation_is_reported_and_not_timed() -> None:
    result = run(WithFaults(), norm_case((8, 32), torch.float32))
    row = result.row("wrong")
    assert row is not None
    assert row.status == "wrong"
    assert row.reason.startswith("y is off by 0.001 (allowed 0.0001)")
    assert not row.call
    assert not row.kernel
    assert "wrong wrong: y is off" in case_line(result)


def test_torchs_own_inaccuracy_is_remarked_on_and_its_times_are_kept() -> None:
    result = run(LayerNorm(), norm_case((20000, 16), torch.bfloat16))
    torchs = result.row("torch")
    assert torchs is not None
    assert torchs.status == "ok"
    assert set(torchs.call) == {"no_grad", "forward", "both"}
    # In torch 2.13 the CPU sums bf16 rows' gradients in bf16; a torch that no longer does has no
    # remark to make.
    assert bool(torchs.flags) == (max(torchs.errors.values()) > 2e-2)


def test_one_that_raises_fails_in_one_line_and_the_others_go_on() -> None:
    result = run(WithFaults(), norm_case((8, 32), torch.float32))
    statuses = {row.name: row.status for row in result.rows}
    assert statuses == {
        "torch": "ok",
        "hfai": "ok",
        "torch.compile": "absent",
        "liger": "absent",
        "quack": "absent",
        "wrong": "wrong",
        "raises": "failed",
        "missing": "absent",
    }
    failed = result.row("raises")
    assert failed is not None
    assert failed.reason == "RuntimeError: no kernel for this length"
    torchs = result.row("torch")
    assert torchs is not None
    assert set(torchs.call) == {"no_grad", "forward", "both"}


def test_ours_is_flagged_where_it_is_less_accurate_than_torch() -> None:
    result = run(LessAccurate(), norm_case((8, 32), torch.float32))
    ours = result.row("hfai")
    assert ours is not None
    assert ours.status == "ok"
    assert any(flag.startswith("y's error is") for flag in ours.flags)
    assert any("8x32 fp32: hfai, y's error is" in remark for remark in remarks([result]))


def test_without_a_gpu_ours_says_that_it_ran_torchs_path() -> None:
    ours = run(LayerNorm(), norm_case((4, 16), torch.float32)).row("hfai")
    assert ours is not None
    assert ours.path.startswith("torch: ")


def test_what_is_too_large_for_the_cpu_is_skipped_with_a_reason() -> None:
    result = run(LayerNorm(), norm_case((MOST_ELEMENTS_ON_CPU + 1, 1), torch.float32))
    assert result.skipped == "more than 64 Mi elements: measured on a GPU only"
    assert not result.rows
    assert result.as_dict()["skipped"]


def made_up(**kernel_ms: float) -> CaseResult:
    """Return a result with these kernel times, forward and backward alike."""
    result = CaseResult(norm_case((4, 8), torch.float32), {})
    for name, milliseconds in kernel_ms.items():
        summary = summarise([milliseconds], "graph")
        result.rows.append(Row(name, kernel={"forward": summary, "backward": summary}))
    return result


def test_ours_is_compared_with_the_fastest_other() -> None:
    forward = made_up(torch=0.08, liger=0.05, hfai=0.04).comparison()["forward"]
    assert forward == {"best_other": "liger", "times_faster": 0.05 / 0.04, "slower": False}


def test_slower_means_by_more_than_noise_in_ratio_and_in_time() -> None:
    def slower(ours: float, other: float) -> bool:
        marked: bool = made_up(torch=other, hfai=ours).comparison()["backward"]["slower"]
        return marked

    assert slower(1.04, 1.0)
    assert not slower(1.02, 1.0), "two percent"
    assert not slower(0.0023, 0.0021), "0.2 µs"
    assert slower(0.0025, 0.0021)
    assert "SLOWER than torch backward" in case_line(made_up(torch=1.0, hfai=1.1))


def test_an_implementation_that_failed_is_not_compared_with() -> None:
    result = made_up(torch=0.08, liger=0.01, hfai=0.04)
    result.rows[1].status = "failed"
    assert result.comparison()["forward"]["best_other"] == "torch"


def test_durations_have_three_digits_and_a_fitting_unit() -> None:
    shown = [duration(ms) for ms in (0.0021, 0.0536, 0.201, 2.08, 38.3, 123.4)]
    assert shown == ["2.10 µs", "53.6 µs", "201 µs", "2.08 ms", "38.3 ms", "123 ms"]


def test_the_tables_show_ratios_and_the_fraction_of_the_floor() -> None:
    result = made_up(torch=0.08, hfai=0.04)
    result.floor = {"forward": {"ms": 0.03}, "backward": {"ms": 0.01}}
    console = Console(width=160, record=True, file=io.StringIO())
    print_tables(console, [result])
    line = next(line for line in console.export_text().splitlines() if "hfai" in line)
    assert [cell.strip() for cell in line.split("│")][2:9] == [
        "hfai",
        *("40.0 µs ±0%", "2.00x", "75%"),
        *("40.0 µs ±0%", "2.00x", "25%"),
    ]
