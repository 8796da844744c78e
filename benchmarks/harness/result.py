"""The result file: its rows, and how it is written.

    {"operator", "complete", "command", "date", "commit", "seed", "machine", "versions", "ceilings",
     "cases": [{"name", "dtype", "shape", "sizes", "skipped", "input_sets", "floor": {pass: …},
                "implementations": [Row…], "comparison": {pass: …}, "date", "commit"}, …]}

A case's own date and commit are those of the run that measured it, which is not the file's where
`merged` has kept it from an earlier one. Passes are "forward" and "backward", and for whole calls
"no_grad", "forward" and "both". Times are milliseconds, memory is bytes.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.case import DTYPE_NAMES, Case
from benchmarks.harness.timing import Summary

# On the grid ours may be behind the best of the others by this much before the case is marked:
# below it two runs of one kernel differ as well.
NOISE_RATIO = 1.03
NOISE_MS = 0.0003


@dataclass
class Row:
    """One implementation's results on one case.

    Attributes:
        name: the implementation's.
        status: "ok", "wrong" (not timed), "failed" (not timed) or "absent".
        reason: why, where the status is not "ok".
        path: which path the call took, for an implementation that has several.
        checked: what was compared with the reference: "all", or "a sample of rows".
        errors: ‖out − ref‖ / ‖ref‖ for each output.
        flags: remarks on a result that should not be read without them.
        kernel: device time of each pass.
        call: whole-call time of each pass, as the host's clock sees it.
        peak_memory_bytes: of one forward and backward, beyond the inputs.
    """

    name: str
    status: str = "ok"
    reason: str = ""
    path: str = ""
    checked: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    kernel: dict[str, Summary] = field(default_factory=dict)
    call: dict[str, Summary] = field(default_factory=dict)
    peak_memory_bytes: int | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return the row as the result file holds it: an error that is no number is null."""
        finite = {name: e if math.isfinite(e) else None for name, e in self.errors.items()}
        return {**asdict(self), "errors": finite}


@dataclass
class CaseResult:
    """Everything measured on one case; `skipped` is the reason where that is nothing."""

    case: Case
    floor: dict[str, dict[str, float]]
    skipped: str = ""
    input_sets: int = 0
    rows: list[Row] = field(default_factory=list)

    def row(self, name: str) -> Row | None:
        """Return the row of one implementation, if it has one."""
        return next((row for row in self.rows if row.name == name), None)

    def comparison(self) -> dict[str, dict[str, Any]]:
        """Compare ours with the fastest other, for each pass whose kernel time is known."""
        timed = [row for row in self.rows if row.status == "ok"]
        ours = next((row for row in timed if row.name == "hfai"), None)
        compared = {}
        for direction, summary in (ours.kernel if ours else {}).items():
            others = {
                row.name: row.kernel[direction].median_ms
                for row in timed
                if row is not ours and direction in row.kernel
            }
            if others:
                best = min(others, key=others.__getitem__)
                compared[direction] = {
                    "best_other": best,
                    "times_faster": others[best] / summary.median_ms,
                    "slower": is_slower(summary.median_ms, others[best]),
                }
        return compared

    def as_dict(self) -> dict[str, Any]:
        """Return the case as the result file holds it."""
        return {
            "name": self.case.name,
            "dtype": DTYPE_NAMES[self.case.dtype],
            "shape": list(self.case.shape),
            "sizes": dict(self.case.sizes),
            "skipped": self.skipped,
            "input_sets": self.input_sets,
            "floor": self.floor,
            "implementations": [row.as_dict() for row in self.rows],
            "comparison": self.comparison(),
        }


def is_slower(ours_ms: float, other_ms: float) -> bool:
    """Say whether ours is slower by more than noise explains."""
    return ours_ms > other_ms * NOISE_RATIO and ours_ms - other_ms > NOISE_MS


def first_line(error: BaseException) -> str:
    """Return an error in one line."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def merged(earlier: dict[str, Any], document: dict[str, Any], order: list[str]) -> dict[str, Any]:
    """Return the document with the earlier one's cases that it has not measured (again).

    Args:
        earlier: a result file's content.
        document: likewise, of a later run.
        order: the names of all cases, in the order in which they are written.

    Raises:
        ValueError: They are of different operators, devices or versions.
    """
    for what in ("operator", "versions"):
        if earlier[what] != document[what]:
            raise ValueError(f"the {what} differ: {earlier[what]} and {document[what]}")
    if earlier["machine"]["name"] != document["machine"]["name"]:
        raise ValueError(
            f"the machines differ: {earlier['machine']['name']}, {document['machine']['name']}"
        )
    run = {key: earlier[key] for key in ("date", "commit")}
    cases = {case["name"]: {**run, **case} for case in earlier["cases"]}
    run = {key: document[key] for key in ("date", "commit")}
    cases |= {case["name"]: {**run, **case} for case in document["cases"]}
    kept = [cases[name] for name in order if name in cases]
    return {**document, "complete": len(kept) == len(order), "cases": kept}


def measured_whole(document: dict[str, Any]) -> set[str]:
    """Return the names of the cases in which nothing failed that the machine has."""
    return {
        case["name"]
        for case in document["cases"]
        if case["implementations"]
        and all(one["status"] in ("ok", "absent") for one in case["implementations"])
    }


def write(path: Path, document: dict[str, Any]) -> None:
    """Write JSON so that the name holds the old file or the new one, whole, whatever happens."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            json.dump(document, stream, indent=1, allow_nan=False)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's own mode keeps others from reading it
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
