"""Every example runs, at a small size, as a user would run it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import torch

from hfai.models import bert_tiny_MLM

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(example: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / example), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_every_example_has_a_test_here() -> None:
    tested = set(re.findall(r'run\("(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


def test_bert_mlm_learns_and_saves_a_plain_torch_model(tmp_path: Path) -> None:
    save = tmp_path / "bert.pt"
    arguments = ("--steps", 60, "--batch-size", 8, "--length", 32, "--save", save)
    done = run("bert_mlm.py", __file__, *arguments)
    assert done.returncode == 0, done.stderr
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", done.stdout)]
    assert losses[0] > 5
    assert losses[-1] < 4
    model = bert_tiny_MLM(vocab_size=264, max_length=32)
    model.load_state_dict(torch.load(save, weights_only=True), strict=True)


def test_bert_mlm_refuses_too_little_text_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    done = run("bert_mlm.py", tmp_path / "short.txt")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("hold 5 bytes, fewer than --length 64")
