"""Checkpoints of torch's own formats, with all they hold."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import checkpoint as dcp

from hfai import checkpoint
from hfai.checkpoint.convert import import_dcp


def save_dcp(path: Path, state: dict[str, Any]) -> None:
    module: Any = dcp
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that one process saves
        module.save(state, checkpoint_id=path, no_dist=True)


@pytest.mark.filterwarnings("ignore:torch.distributed")
@pytest.mark.parametrize("kind", ["Adam", "SGD"])
def test_a_raw_optimizers_state_is_imported_whole(kind: str, tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, getattr(torch.optim, kind)(model.parameters(), lr=0.25)

    model, optimizer = make()
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    save_dcp(tmp_path / "dcp", {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    import_dcp(tmp_path / "dcp", tmp_path / "a")
    loaded = checkpoint.load(tmp_path / "a")
    other, fresh = make()
    other.load_state_dict(loaded["model"])
    fresh.load_state_dict(loaded["optimizer"])
    assert fresh.param_groups[0]["lr"] == 0.25
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert fresh.state[two].keys() == optimizer.state[one].keys()
        for key, value in optimizer.state[one].items():
            assert torch.equal(fresh.state[two][key], value)


@pytest.mark.filterwarnings("ignore:torch.distributed")
def test_a_state_of_other_parameters_is_refused(tmp_path: Path) -> None:
    state = {"state": {"w": {"m": torch.ones(1)}}, "param_groups": [{"lr": 1.0, "params": [0]}]}
    save_dcp(tmp_path / "dcp", {"model": {"w": torch.ones(1)}, "optimizer": state})
    with pytest.raises(checkpoint.CheckpointError, match="other parameters than its groups"):
        import_dcp(tmp_path / "dcp", tmp_path / "a")
    assert not (tmp_path / "a").exists()
