"""The result files, read for drawing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# What each implementation is called in a heading; others go by their own names.
TITLES = {"liger": "Liger", "torch.compile": "torch.compile"}


@dataclass(frozen=True)
class Result:
    """One result file: `name` is the operator, with `_grid` for the grid's."""

    name: str
    data: Mapping[str, Any]

    @property
    def machine(self) -> Mapping[str, Any]:
        """What the run says about the machine."""
        machine: Mapping[str, Any] = self.data["machine"]
        return machine

    @property
    def measured(self) -> list[Mapping[str, Any]]:
        """The cases that were not skipped."""
        return [case for case in self.data["cases"] if not case.get("skipped")]

    @property
    def implementations(self) -> list[str]:
        """The names of all implementations that took part in some case, ours last."""
        names = {
            row["name"]
            for case in self.measured
            for row in case["implementations"]
            if row["status"] != "absent"
        }
        order = ["torch", "torch.compile", "liger", "quack"]
        rest = sorted(names - {*order, "hfai"})
        return [name for name in (*order, *rest, "hfai") if name in names]

    def provenance(self) -> str:
        """Return a sentence that names machine, versions, date and command."""
        machine, versions = self.machine, dict(self.data["versions"])
        where = machine["name"]
        if machine.get("driver"):
            where += f" (driver {machine['driver']})"
        shown = ", ".join(f"{name} {version}" for name, version in versions.items())
        partly = "" if self.data["complete"] else " The run was cut short."
        runs = self._runs()
        return f"{where}; {shown}; {self.data['date'][:10]}.{runs}{partly} `{self.data['command']}`"

    def _runs(self) -> str:
        """Return a sentence on which rows are of an earlier run, where some are."""
        commit = self.data.get("commit")
        earlier: dict[str, list[str]] = {}
        for case in self.measured:
            if case.get("commit", commit) != commit:
                earlier.setdefault(case["commit"][:8], []).append(case["name"])
        if not earlier:
            return ""
        rows = "; ".join(f"{', '.join(names)} of commit {of}" for of, names in earlier.items())
        return f" Measured at commit {str(commit)[:8]}, earlier rows kept: {rows}."


def load(directory: Path) -> list[Result]:
    """Read every <machine>/<name>.json, in the order of their paths, and <name>.json of ways.

    Raises:
        ValueError: a file is no result file.
    """
    results = []
    for path in sorted(directory.glob("*/*.json")):
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
            result = Result(path.stem, data)
            _ = (result.machine["name"], data["cases"], data["command"], data["complete"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{path} is no result file of benchmarks/ops.py ({type(error).__name__}: {error}): "
                f"remove it or measure again"
            ) from error
        results.append(result)
    for path in sorted(directory.glob("*.json")):
        data = json.loads(path.read_text(encoding="utf-8"))
        if isinstance(data, dict) and data.get("kind") == "ways":
            results.append(Result(path.stem, data))
    return results


def row_of(case: Mapping[str, Any], name: str) -> Mapping[str, Any] | None:
    """Return one implementation's row of a case."""
    rows: list[Mapping[str, Any]] = case["implementations"]
    return next((row for row in rows if row["name"] == name), None)


def median_ms(case: Mapping[str, Any], name: str, kind: str, what: str) -> float | None:
    """Return a median, or None where there is none.

    Args:
        case: of a result file.
        name: the implementation's.
        kind: "kernel" or "call".
        what: the pass.
    """
    row = row_of(case, name)
    if row is None or row["status"] != "ok" or what not in row[kind]:
        return None
    return float(row[kind][what]["median_ms"])
