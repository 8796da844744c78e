"""The run as one JSON object: machine, versions, command, and every figure behind the table."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hfai.atomic import replacing
from hfai.demo.compare import Comparison, Side
from hfai.demo.corpus import Corpus
from hfai.demo.machine import describe_machine, describe_versions
from hfai.demo.outcome import Outcome

FILE_NAME = "figures.json"
FORMAT = 1


def collect_figures(
    outcome: Outcome, corpus: Corpus, device: torch.device, command: str
) -> dict[str, Any]:
    """Return the figures of a run as plain data; docs/demo.md describes the fields."""
    return {
        "format": FORMAT,
        "command": command,
        "machine": describe_machine(device),
        "versions": describe_versions(),
        "device": device.type,
        "settings": outcome.settings.as_dict(),
        "corpus": {
            "sha256": corpus.digest,
            "training_bytes": corpus.training_bytes,
            "held_out_bytes": corpus.held_out_bytes,
            "unigram_entropy_nats": outcome.unigram,
        },
        "together": None if outcome.together is None else asdict(outcome.together),
        "interrupted": outcome.interrupted,
        "failure": outcome.failure,
        "layers": {
            "swapped": outcome.swap.swapped,
            "paths": [asdict(path) for path in outcome.swap.paths],
        },
        "training": {
            "steps_done": len(outcome.losses),
            "resumed_from": outcome.resumed_from,
            "seconds": outcome.training_seconds,
            "tokens_per_second": outcome.training_tokens_per_second,
            "first_loss": _finite(outcome.losses[0]) if outcome.losses else None,
            "last_loss": _finite(outcome.last_loss),
            "losses": [_finite(loss) for loss in outcome.losses],
        },
        "comparison": _comparison(outcome.comparison),
        "peak_memory_bytes": outcome.peak_memory,
        "round_trip": None if outcome.round_trip is None else asdict(outcome.round_trip),
        "checks": [asdict(check) for check in outcome.checks()],
    }


def write_figures(path: Path, figures: dict[str, Any]) -> None:
    """Write the figures to `path`, whole or not at all."""
    with replacing(path) as file:
        file.write(to_json(figures).encode())


def to_json(figures: dict[str, Any]) -> str:
    """Return the figures as the text that the file holds and `--json` prints."""
    return json.dumps(figures, indent=1, allow_nan=False) + "\n"


def _comparison(comparison: Comparison | None) -> dict[str, Any] | None:
    if comparison is None:
        return None
    return {
        "steps_per_block": comparison.steps_per_block,
        "torch": _side(comparison.torch),
        "hfai": _side(comparison.hfai),
        "ratio": comparison.ratio,
        "ratios": comparison.ratios,
    }


def _side(side: Side) -> dict[str, Any]:
    return {
        "tokens_per_second": statistics.median(side.tokens_per_second),
        "blocks": side.tokens_per_second,
        "held_out_loss": _finite(side.loss),
        "peak_memory_bytes": side.peak_memory,
    }


def _finite(value: float | None) -> float | None:
    """Return the value, or None for what JSON has no number for."""
    return value if value is not None and math.isfinite(value) else None
