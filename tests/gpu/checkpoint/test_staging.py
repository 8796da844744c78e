"""Saves from a GPU: a snapshot while the GPU goes on, no copy on the device, the same bits back."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from hfai import checkpoint
from hfai.checkpoint.shard import SEGMENT
from hfai.checkpoint.staging import HostPool
from tests.checkpoint.training import bits

SIZE = 4096


def _training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(SIZE, SIZE), nn.BatchNorm1d(SIZE), nn.Linear(SIZE, SIZE)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    _step(model, optimizer)
    return model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(64, SIZE, device="cuda")).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_save_is_of_its_moment_and_takes_no_memory_of_the_gpu(tmp_path: Path) -> None:
    model, optimizer = _training()
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    pool = HostPool(4 * SEGMENT)
    handle = checkpoint.save_async(tmp_path / "a", model, optimizer, pool=pool)
    assert torch.cuda.max_memory_allocated() - before < 1 << 20
    for _ in range(3):
        _step(model, optimizer)
    handle.wait()
    assert pool.allocated <= 4 * SEGMENT
    loaded = checkpoint.load(tmp_path / "a")["model"]
    assert {name: bits(tensor) for name, tensor in loaded.items()} == expected


def test_a_resumed_training_goes_on_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = _training()
    checkpoint.save(tmp_path / "a", model, optimizer)
    saved = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    states = {
        (number, key): bits(value)
        for number, parameter in enumerate(model.parameters())
        for key, value in optimizer.state[parameter].items()
    }
    _step(model, optimizer)
    other, second = _training()
    checkpoint.load_into(tmp_path / "a", other, second, rng=True)
    assert {name: bits(tensor) for name, tensor in other.state_dict().items()} == saved
    for number, parameter in enumerate(other.parameters()):
        for key, value in second.state[parameter].items():
            assert value.device.type == "cuda"
            assert bits(value) == states[number, key]


def test_generators_of_all_devices_come_back(tmp_path: Path) -> None:
    torch.cuda.manual_seed_all(3)
    checkpoint.save(tmp_path / "a", {"w": torch.ones(3, device="cuda")})
    expected = torch.rand(5, device="cuda")
    into = {"w": torch.zeros(3, device="cuda")}
    checkpoint.load_into(tmp_path / "a", into, rng=True)
    assert torch.equal(torch.rand(5, device="cuda"), expected)
    assert into["w"].tolist() == [1, 1, 1]
    assert checkpoint.load(tmp_path / "a", "cuda")["model"]["w"].is_cuda
