"""Tables and plots come from the result files, and `--check` says when they do not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from benchmarks.drawing import pages, plots, results, sweeps, tables
from benchmarks.figures import update
from benchmarks.harness import ways

from tests.benchmarks.conftest import ROOT

Write = Callable[..., Path]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def tree(tmp_path: Path, write_results: Write) -> Path:
    """A small repository: two result files, a README and a page with markers."""
    write_results(tmp_path / "benchmarks" / "results")
    write_results(tmp_path / "benchmarks" / "results", grid=True, slower_case="4096x1024 bf16")
    (tmp_path / "docs" / "kernels").mkdir(parents=True)
    (tmp_path / "README.md").write_text(
        "before\n<!-- figures:layer_norm -->\nwhat stood here\n<!-- /figures -->\nafter\n"
    )
    (tmp_path / "docs" / "kernels" / "page.md").write_text(
        "<!-- figures:layer_norm:calls --><!-- /figures -->\n"
        "<!-- figures:layer_norm:grid --><!-- /figures -->\n"
        "<!-- figures:rms_norm:grid --><!-- /figures -->\n"
    )
    return tmp_path


def test_the_committed_figures_are_up_to_date(run_script: Run) -> None:
    done = run_script("figures.py", "--check")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_ratio_table_is_drawn_between_its_markers(tree: Path) -> None:
    update(tree, tree / "benchmarks" / "results", write=True)
    text = (tree / "README.md").read_text()
    assert text.startswith("before\n<!-- figures:layer_norm -->\n")
    assert text.endswith("<!-- /figures -->\nafter\n")
    assert "what stood here" not in text
    assert "| size | pass | torch | Liger | hfai | hfai vs torch | of the floor |" in text
    # 2·25600·1024·4 bytes and two parameters at 4 TB/s, times 1.1 and 2 µs for ours.
    assert "| 25600×1024 fp32 | forward | 0.0964 | 0.0754 | **0.0597** | **1.62×** | 88% |" in text
    assert "NVIDIA Made-Up 1 (driver 1.2.3); python 3.12.0, torch 2.11.0; 2026-01-02." in text
    assert "`python benchmarks/ops.py --op layer_norm`" in text


def test_a_page_gets_whole_calls_the_grids_finding_and_its_plots(tree: Path) -> None:
    update(tree, tree / "benchmarks" / "results", write=True)
    text = (tree / "docs" / "kernels" / "page.md").read_text()
    assert "| 64×768 fp32 | forward, no grad |" in text
    assert "hfai is slower than the best of torch and Liger in 2 of 238" in text
    assert "| 4096×1024 bf16 | backward |" in text
    assert "Not measured yet: `python benchmarks/ops.py --op rms_norm --grid` does." in text
    for dtype in ("bf16", "fp32"):
        name = f"layer_norm_grid-nvidia-made-up-1-{dtype}.png"
        assert f"](../figures/{name})" in text
        assert (tree / "docs" / "figures" / name).read_bytes().startswith(b"\x89PNG")


def test_check_finds_what_a_new_measurement_changes_and_writes_nothing(
    tree: Path, write_results: Write, run_script: Run
) -> None:
    assert run_script("figures.py", "--root", tree).returncode == 0
    assert run_script("figures.py", "--root", tree, "--check").returncode == 0
    write_results(tree / "benchmarks" / "results", grid=True)
    before = {path: path.read_bytes() for path in (tree / "docs").rglob("*.*")}
    done = run_script("figures.py", "--root", tree, "--check")
    assert done.returncode == 1
    assert done.stdout.splitlines() == [
        "docs/figures/layer_norm_grid-nvidia-made-up-1-bf16.png is out of date: run make figures",
        "docs/kernels/page.md is out of date: run make figures",
    ]
    assert {path: path.read_bytes() for path in (tree / "docs").rglob("*.*")} == before


def test_a_table_edited_by_hand_is_out_of_date(tree: Path) -> None:
    directory = tree / "benchmarks" / "results"
    update(tree, directory, write=True)
    readme = tree / "README.md"
    readme.write_text(readme.read_text().replace("**1.62×**", "**9.99×**"))
    assert update(tree, directory, write=False) == [readme]


def test_two_machines_give_two_tables(tree: Path, write_results: Write) -> None:
    write_results(tree / "benchmarks" / "results", machine="NVIDIA Made-Up 2")
    update(tree, tree / "benchmarks" / "results", write=True)
    text = (tree / "README.md").read_text()
    assert text.index("NVIDIA Made-Up 1 (driver") < text.index("NVIDIA Made-Up 2 (driver")


def test_what_was_wrong_or_on_torchs_path_is_said_in_the_table(
    tree: Path, write_results: Write
) -> None:
    path = write_results(tree / "benchmarks" / "results")
    document = json.loads(path.read_text())
    rows = document["cases"][0]["implementations"]
    rows[1]["status"], rows[1]["kernel"] = "wrong", {}
    rows[2]["path"] = "torch: no cuda-core"
    path.write_text(json.dumps(document))
    (result,) = [r for r in results.load(path.parents[1]) if r.name == "layer_norm"]
    table = tables.kernel_table(result)
    assert "| 25600×1024 fp32 | forward | 0.0964 | wrong | **0.0597** |" in table
    assert "hfai ran torch's own path here (no cuda-core)." in table


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<!-- figures:layer_norm -->\n", "is not closed: add <!-- /figures --> after it"),
        (
            "<!-- figures:layer_norm -->\n<!-- figures:rms_norm -->\n<!-- /figures -->",
            "figures:layer_norm --> is not closed",
        ),
        (
            "<!-- figures:layer_norm:speed --><!-- /figures -->",
            "there are no figures 'speed': the kinds are kernel, calls, grid",
        ),
    ],
    ids=["open", "nested", "kind"],
)
def test_a_marker_that_cannot_be_filled_is_named(tmp_path: Path, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=r"README\.md") as caught:
        pages.fill(text, tmp_path / "README.md", tmp_path, [])
    assert words in str(caught.value)


def test_a_file_that_is_no_result_stops_with_its_name(tree: Path, run_script: Run) -> None:
    path = tree / "benchmarks" / "results" / "nvidia-made-up-1" / "layer_norm.json"
    path.write_text('{"cases": []}')
    done = run_script("figures.py", "--root", tree)
    assert done.returncode == 1
    assert f"{path} is no result file" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_plot_is_current_only_with_the_data_it_shows(tree: Path) -> None:
    (result,) = [r for r in results.load(tree / "benchmarks" / "results") if "grid" in r.name]
    name, curves = next(iter(plots.plots_of(result).items()))
    assert len(curves) == 2 * 4, "forward and backward for each number of rows"
    assert set(curves["forward", 4096]) == {"torch", "liger", "hfai", "floor"}
    plots.draw(tree / name, curves, "title")
    assert plots.is_current(tree / name, plots.digest(curves, "title"))
    length, time = curves["forward", 4096]["hfai"][0]
    curves["forward", 4096]["hfai"][0] = (length, time * 1.001)
    assert not plots.is_current(tree / name, plots.digest(curves, "title"))


def test_a_grid_of_hidden_sizes_and_batches_is_drawn_along_both(tmp_path: Path) -> None:
    def case(batch: int, hidden: int) -> dict[str, Any]:
        def row(name: str, ms: float) -> dict[str, Any]:
            times = {what: {"median_ms": ms * hidden} for what in ("forward", "backward")}
            return {"name": name, "status": "ok", "kernel": times}

        sizes = {"batch": batch, "hidden": hidden}
        rows = [row("torch", 2.0), row("hfai", 1.0)]
        return {"sizes": sizes, "dtype": "fp32", "skipped": "", "implementations": rows}

    swept = [(4, h) for h in (64, 128, 256)] + [(b, 256) for b in (1, 2, 4, 8)]
    data = {
        "operator": "lstm",
        "machine": {"slug": "made-up", "name": "Made up"},
        "cases": [case(*sizes) for sizes in dict.fromkeys(swept)],
    }
    result = results.Result("lstm_grid", data)
    drawn = sweeps.plots_of(result)
    assert set(drawn) == {"lstm_grid-made-up-hidden-fp32.png", "lstm_grid-made-up-batch-fp32.png"}
    hidden = drawn["lstm_grid-made-up-hidden-fp32.png"]
    assert set(hidden) == {("forward", "hidden", 4), ("backward", "hidden", 4)}
    assert hidden["forward", "hidden", 4]["hfai"] == [(64, 64.0), (128, 128.0), (256, 256.0)]
    for name, curves in drawn.items():
        sweeps.draw(tmp_path / name, curves, "title")
        assert plots.is_current(tmp_path / name, sweeps.digest(curves, "title"))
        assert not plots.is_current(tmp_path / name, sweeps.digest(curves, "another"))


@pytest.mark.parametrize(
    ("milliseconds", "shown"),
    [(0.00218, "0.00218"), (0.0536, "0.0536"), (0.201, "0.201"), (2.08, "2.08"), (38.31, "38.3")],
)
def test_times_have_three_significant_digits(milliseconds: float, shown: str) -> None:
    assert tables.number(milliseconds) == shown


def test_this_repositorys_pages_are_found() -> None:
    found = pages.pages(ROOT)
    assert found[0] == ROOT / "README.md"
    assert ROOT / "docs" / "benchmarks.md" in found


def test_many_cases_are_a_row_each_and_share_a_table_where_they_compare_the_same(
    tmp_path: Path,
) -> None:
    def case(name: str, *others: str) -> dict[str, Any]:
        return ways.as_case(
            name,
            "ms",
            {"torch": [2.0, 2.0, 2.0], **{way: [1.0, 1.5, 1.2] for way in others}},
            "torch",
            say=lambda line: None,
        )

    document = ways.document("layers.py", "Layers", [], (), {})
    document["cases"] = [case("a", "hfai"), case("b", "hfai", "apart"), case("c", "hfai")]
    document["complete"] = True
    folder = tmp_path / "benchmarks" / "results" / "machine"
    folder.mkdir(parents=True)
    (folder / "layers.json").write_text(json.dumps(document))
    page = tmp_path / "README.md"
    page.write_text("<!-- figures:layers:cases --><!-- /figures -->\n")
    update(tmp_path, tmp_path / "benchmarks" / "results", write=True)
    text = page.read_text()
    assert "| case | torch, ms | hfai, to torch |\n|---|--:|--:|\n| a | 2 | 0.6 (0.5 to" in text
    assert "| case | torch, ms | hfai, to torch | apart, to torch |" in text
    assert text.count("| case |") == 2


def test_a_grid_of_attention_is_drawn_over_length(tmp_path: Path) -> None:
    sizes = {"batch": 4, "features": 512, "heads": 8, "need_weights": 0, "ieee": 0}
    times = {what: {"median_ms": 0.5} for what in ("forward", "backward")}
    row = {"name": "torch", "status": "ok", "kernel": times}
    cases = [
        {
            "name": f"{length}, {kind}",
            "dtype": "bf16",
            "skipped": "",
            "sizes": sizes | {"length": length, "kind": kind},
            "implementations": [row],
        }
        for length in (64, 128, 256)
        for kind in (0, 1)
    ]
    data = {"cases": cases, "machine": {"slug": "machine", "name": "Made-Up 1"}}
    result = results.Result("mha_grid", data)
    assert sweeps.has_sweeps(result)
    drawn = sweeps.plots_of(result)
    assert list(drawn) == [
        "mha_grid-machine-length-bf16.png",
        "mha_grid-machine-length-bf16-causal.png",
    ]
    (curves,) = {json.dumps(c["torch"]) for c in drawn["mha_grid-machine-length-bf16.png"].values()}
    assert [point[0] for point in json.loads(curves)] == [64, 128, 256]
