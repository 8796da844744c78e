"""The result file holds the old content or the new, whole."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from benchmarks.harness.machine import command, slug
from benchmarks.harness.result import Row, merged, write


def test_a_write_that_fails_leaves_the_old_file_and_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "results" / "op.json"
    write(path, {"cases": [1]})
    with pytest.raises(ValueError, match="JSON compliant"):
        write(path, {"cases": [1, math.nan]})
    assert json.loads(path.read_text()) == {"cases": [1]}
    assert [file.name for file in path.parent.iterdir()] == ["op.json"]


def test_the_file_can_be_read_by_others(tmp_path: Path) -> None:
    path = tmp_path / "op.json"
    write(path, {})
    assert path.stat().st_mode & 0o777 == 0o644


def test_an_error_that_is_no_number_is_written_as_null() -> None:
    row = Row("liger", "wrong", errors={"y": math.nan, "dx": 1e-3}).as_dict()
    assert json.loads(json.dumps(row, allow_nan=False))["errors"] == {"y": None, "dx": 1e-3}


@pytest.mark.parametrize("out", [["--out", "/some/where"], ["--out=/some/where"]], ids=str)
def test_the_command_is_recorded_without_the_place_of_its_file(out: list[str]) -> None:
    given = ["--op", "layer_norm", *out, "--cases", "64x768 fp32", "--commit", "abc"]
    assert command(given) == "python benchmarks/ops.py --op layer_norm --cases '64x768 fp32'"


@pytest.mark.parametrize(
    ("name", "directory"),
    [("NVIDIA H200", "nvidia-h200"), ("AMD EPYC 9654 96-Core", "amd-epyc-9654-96-core")],
)
def test_a_machines_directory_is_named_after_its_processor(name: str, directory: str) -> None:
    assert slug(name) == directory


def document(commit: str, *names: str, version: str = "1") -> dict[str, Any]:
    cases = [{"name": name, "skipped": ""} for name in names]
    run = {"date": f"date of {commit}", "commit": commit, "versions": {"torch": version}}
    return {"operator": "op", "machine": {"name": "GPU"}, "complete": False, "cases": cases} | run


def test_cases_of_an_earlier_run_are_kept_where_a_later_one_did_not_come_to_them() -> None:
    both = merged(document("a", "small", "large"), document("b", "tiny", "small"), [*"xy"])
    assert both["cases"] == []
    order = ["tiny", "small", "large"]
    both = merged(document("a", "small", "large"), document("b", "tiny", "small"), order)
    assert [(case["name"], case["commit"]) for case in both["cases"]] == [
        ("tiny", "b"),
        ("small", "b"),
        ("large", "a"),
    ]
    assert both["cases"][2]["date"] == "date of a"
    assert both["complete"] is True
    assert both["commit"] == "b"


def test_runs_of_different_versions_are_not_merged() -> None:
    with pytest.raises(ValueError, match="versions differ"):
        merged(document("a", "x"), document("b", "y", version="2"), ["x", "y"])
