"""The all-reduce benchmark measures what it says, and its table is drawn from its file."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from benchmarks.drawing import pages, results

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def test_a_quick_look_writes_a_file_from_which_the_table_is_drawn(
    tmp_path: Path, run_script: Run
) -> None:
    out = tmp_path / "machine" / "allreduce_cpu.json"
    arguments = ("--ranks", "2", "--dtype", "bf16", "--most", "0.0625", "--rounds", "2")
    done = run_script("allreduce.py", *arguments, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "2 ranks bf16    4 KiB: Reducer" in done.stdout
    assert "least ratio to gloo up to 1 MiB:" in done.stdout
    written = json.loads(out.read_text())
    assert [case["bytes"] for case in written["cases"]] == [4096, 16384, 65536]
    assert not written["complete"], "a part of the table is no table"
    for case in written["cases"]:
        assert [row["name"] for row in case["rows"]] == ["Reducer", "backend", "gloo"]
        for row in case["rows"]:
            assert len(row["us"]) == 2
            assert row["median_us"] > 0
    (result,) = results.load(tmp_path)
    text = pages.fill(
        "<!-- figures:allreduce_cpu --><!-- /figures -->", tmp_path / "page.md", tmp_path, [result]
    )
    assert "| 2 | bf16 | 4 KiB | " in text
    assert "The run was cut short." in text


def test_before_it_is_measured_the_page_says_how(tmp_path: Path) -> None:
    text = pages.fill(
        "<!-- figures:allreduce_cpu --><!-- /figures -->", tmp_path / "page.md", tmp_path, []
    )
    assert "Not measured yet: `python benchmarks/allreduce.py` does." in text
