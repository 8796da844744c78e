"""Several ways of one thing: in turn, compared round by round, and drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from benchmarks.drawing import ways as drawing
from benchmarks.drawing.results import load
from benchmarks.figures import update
from benchmarks.harness import ways

from benchmarks import images, sampling
from tests.benchmarks.conftest import ROOT


def case(lines: list[str] | None = None) -> dict[str, object]:
    said = [] if lines is None else lines
    return ways.in_turn(
        "reading",
        "MB/s",
        {"plain": lambda turn: 10.0 + turn, "ffrecord": lambda turn: 30.0},
        3,
        "plain",
        say=said.append,
    )


def test_every_round_starts_with_another_way() -> None:
    order: list[str] = []
    measures = {name: lambda turn, name=name: order.append(name) or 1.0 for name in "abc"}
    ways.in_turn("x", "s", measures, 3, "a", say=lambda line: None)
    assert "".join(order) == "abcbcacab"


def test_ratios_are_taken_within_a_round() -> None:
    lines: list[str] = []
    found = case(lines)
    plain, ours = found["rows"]  # type: ignore[misc]
    assert plain["rounds"] == [10, 11, 12]
    assert ours["ratios"] == [3, 2.727, 2.5]
    assert (plain["median"], ours["median"]) == (11, 30)
    assert len(lines) == 3


def test_a_table_and_a_plot_come_from_the_result_file(tmp_path: Path) -> None:
    made = ways.document("images.py", "Loading", ["--rounds", "3"], ["numpy"], {"MDS": "not there"})
    made["cases"].append(case())
    curve = {"torch": [4.0, 2.0], "hfai": [4.5, 2.0]}
    made["cases"].append(
        ways.as_case("loss", "nats", curve, None, by="step", say=lambda line: None)
    )
    made["complete"] = True
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "images.json").write_text(json.dumps(made))
    (tmp_path / "docs").mkdir()
    page = tmp_path / "docs" / "page.md"
    page.write_text(
        "<!-- figures:images:ways --><!-- /figures -->\n"
        "<!-- figures:sampling:ways --><!-- /figures -->\n"
    )
    (tmp_path / "README.md").write_text("")
    assert len(update(tmp_path, tmp_path / "results", write=True)) == 2
    text = page.read_text()
    assert "| **ffrecord** | **30** | 2.73 (2.5 to 3) |" in text
    assert "| hfai | 2.0000 | 3.2500 | 0.2500 | 0.2500 |" in text
    assert "Not measured: MDS: not there." in text
    assert "`python benchmarks/images.py --rounds 3`" in text
    assert "![Loading](figures/images.png)" in text
    assert "Not measured yet: `python benchmarks/sampling.py` does." in text
    assert (tmp_path / "docs" / "figures" / "images.png").read_bytes().startswith(b"\x89PNG")
    assert update(tmp_path, tmp_path / "results", write=True) == []


def test_committed_results_are_complete_or_their_tables_say_that_they_are_not() -> None:
    found = [r for r in load(ROOT / "benchmarks" / "results") if r.data.get("kind") == "ways"]
    for result in found:
        assert result.data["complete"] or "The run was cut short." in drawing.table(result)
        for measured in result.measured:
            fewest = min(len(row["rounds"]) for row in measured["rows"])
            assert fewest >= 5 or "--rounds" in result.data["command"]  # asked for, so said


@pytest.mark.parametrize(
    ("value", "text"), [(12345.6, "12,346"), (1.2345, "1.23"), (0, "0"), (2e-7, "2.0e-07")]
)
def test_figures_have_three_digits(value: float, text: str) -> None:
    assert drawing.number(value) == text


def test_orders_that_are_not_shuffled_show_in_both_figures() -> None:
    files = np.arange(sampling.N)
    shuffled = np.random.default_rng(0).permutation(files)
    assert sampling.rank_correlation(files) == pytest.approx(1)
    assert sampling.rank_correlation(shuffled) < 0.005
    assert sampling.bunching(shuffled) == pytest.approx(1, abs=0.05)
    assert sampling.bunching(files) > 800


def test_every_way_of_loading_gives_every_image_once(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    source = [bytes([n]) * (1000 + n) for n in range(2 * images.BATCH)]
    absent: dict[str, str] = {}
    loaders = images.make_ways(tmp_path, source, images.weigh, 0, absent)
    assert {"ffrecord", "plain files"} <= set(loaders)
    assert set(loaders).isdisjoint(absent)
    for name, loader in loaders.items():
        found = sorted(int(size) for batch in loader for size in batch)
        assert found == sorted(map(len, source)), name


def test_made_images_decode_to_one_shape() -> None:
    pytest.importorskip("PIL")
    (data,) = images.make_images(1)
    assert 30_000 < len(data) < 100_000
    assert images.decode(data).shape == (224, 224, 3)
