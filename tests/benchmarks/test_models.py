"""The benchmark of whole models: both sides start alike and stay alike, and a file comes out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from benchmarks import models

CPU = torch.device("cpu")


@pytest.fixture
def workload() -> models.Workload:
    absent: dict[str, str] = {}
    (found,) = models.workloads(["bert_tiny"], absent)
    assert not absent
    return found


def test_both_ways_start_from_the_same_weights_and_are_of_their_class(
    workload: models.Workload,
) -> None:
    torchs, ours = models.step_ways(workload, CPU, compiled=False).values()
    for one, other in zip(torchs.model.parameters(), ours.model.parameters(), strict=True):
        assert torch.equal(one, other)
        assert one is not other
    kinds = [type(t.model.layers[0].self_attn).__module__ for t in (torchs, ours)]
    assert kinds == ["torch.nn.modules.activation", "hfai.nn.attention"]


def test_a_step_changes_the_weights(workload: models.Workload) -> None:
    trained, _ = models.step_ways(workload, CPU, compiled=False).values()
    before = [p.detach().clone() for p in trained.model.parameters()]
    assert torch.isfinite(trained.step(workload.draw(CPU)))
    changed = [
        not torch.equal(p, b) for p, b in zip(trained.model.parameters(), before, strict=True)
    ]
    assert all(changed)


def test_curves_see_the_same_batches(workload: models.Workload) -> None:
    streams = [models.source_batches(torch.Size((2, 16)), CPU) for _ in range(2)]
    for (ids, labels), (same_ids, same_labels), _ in zip(*streams, range(3), strict=False):
        assert torch.equal(ids, same_ids)
        assert torch.equal(labels, same_labels)
        assert (ids[labels != -100] == 256).all()


def test_the_command_writes_a_result_file(tmp_path: Path) -> None:
    out = tmp_path / "models.json"
    arguments = ["--model", "bert_tiny", "--rounds", "1", "--steps", "1", "--no-compiled", "--out"]
    done = CliRunner().invoke(models.main, [*arguments, str(out)])
    assert done.exit_code == 0, done.output
    made = json.loads(out.read_text())
    assert made["complete"]
    assert [row["way"] for row in made["cases"][0]["rows"]] == ["torch, eager", "hfai, eager"]
