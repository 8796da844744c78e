"""Saves from a GPU: a snapshot while the GPU goes on, no copy on the device, the same bits back."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

from hfai import checkpoint
from hfai.checkpoint.page_locked import lock, page_locked
from hfai.checkpoint.shard import SEGMENT
from hfai.checkpoint.staging import HostPool
from tests.checkpoint.test_manager import in_child
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


def test_prepared_buffers_are_page_locked_within_the_budget_and_given_back() -> None:
    pool = HostPool(7 * SEGMENT)
    pool.prepare(100 * SEGMENT)
    assert pool.wait_prepared(60)
    assert pool.allocated == 7 * SEGMENT
    buffers = [pool.acquire() for _ in range(7)]
    assert pool.acquire(lambda: True) is None
    source = torch.arange(SEGMENT, device="cuda", dtype=torch.int64).to(torch.uint8)
    for buffer in buffers:
        assert buffer is not None
        assert buffer.is_pinned()
        assert buffer.data_ptr() % 4096 == 0
        buffer.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    for buffer in buffers:
        assert buffer is not None
        assert torch.equal(buffer, source.cpu())
        pool.release(buffer)
    del buffer
    buffers.clear()
    before = _locked()
    pool.trim()
    assert pool.allocated == 0
    assert before - _locked() >= 6 * SEGMENT


def _locked() -> int:
    """Return the bytes of this process's own memory."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def test_as_much_is_prepared_as_a_save_takes_and_that_makes_no_more(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Linear(SIZE, 4 * SIZE, device="cuda")
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pool = checkpoint.prepare(model, optimizer)  # it has done no step, and will have two averages
    assert pool.wait_prepared(60)
    prepared = pool.allocated
    model(torch.ones(1, SIZE, device="cuda")).sum().backward()
    optimizer.step()
    expected = bits(model.weight.detach())
    for name in ("a", "b"):
        checkpoint.save_async(tmp_path / name, model, optimizer, pool=pool).wait()
        assert abs(pool.allocated - prepared) <= SEGMENT
    assert bits(checkpoint.load(tmp_path / "b")["model"]["weight"]) == expected
    with checkpoint.CheckpointManager(tmp_path / "many", every=5) as manager:
        assert manager.resume(model, optimizer) is None
        assert manager._pool.wait_prepared(60)
        assert abs(manager._pool.allocated - prepared) <= SEGMENT


def test_a_save_in_the_midst_of_preparing_is_whole(tmp_path: Path) -> None:
    model, optimizer = _training()
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    pool = checkpoint.prepare(model, optimizer, host_budget=5 * SEGMENT)
    handle = checkpoint.save_async(tmp_path / "a", model, optimizer, pool=pool)
    for _ in range(3):
        _step(model, optimizer)
    handle.wait()
    assert pool.allocated <= 5 * SEGMENT
    loaded = checkpoint.load(tmp_path / "a")["model"]
    assert {name: bits(tensor) for name, tensor in loaded.items()} == expected


def test_a_graph_that_is_captured_meanwhile_is_whole() -> None:
    pool = HostPool(40 * SEGMENT)
    ones = torch.ones(1000, device="cuda")
    torch.cuda.synchronize()
    pool.prepare(40 * SEGMENT)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        total = ones
        while pool.allocated < 10 * SEGMENT:
            total = total + 1
            time.sleep(0.001)
    made = pool.allocated
    graph.replay()
    assert made < 40 * SEGMENT, "it was captured while buffers were made"
    assert float(total[0]) > 1
    assert pool.wait_prepared(60)
    assert pool.allocated == 40 * SEGMENT


def test_memory_that_is_not_locked_is_used_all_the_same(tmp_path: Path) -> None:
    model, optimizer = _training()
    expected = {name: bits(tensor) for name, tensor in model.state_dict().items()}
    pool = HostPool(4 * SEGMENT)
    once = page_locked(SEGMENT, torch.device("cuda"))

    def twice() -> torch.Tensor:  # CUDA locks no memory a second time
        lock(once, torch.device("cuda"))
        return once

    def prepare() -> None:
        pool.expect(4, twice, hurried=False)
        assert pool.wait_prepared(60)

    with pytest.warns(UserWarning, match=r"not page-locked beyond 0 bytes.*already"):
        prepare()
    checkpoint.save_async(tmp_path / "a", model, optimizer, pool=pool).wait()
    loaded = checkpoint.load(tmp_path / "a")["model"]
    assert {name: bits(tensor) for name, tensor in loaded.items()} == expected
    _step(model, optimizer)  # the error was another thread's


def test_a_forked_child_leaves_prepared_buffers_alone() -> None:
    pool = HostPool(3 * SEGMENT)
    pool.prepare(3 * SEGMENT)
    assert pool.wait_prepared(60)

    def child() -> None:
        assert pool.allocated == 0
        buffer = pool.acquire()
        assert buffer is not None
        buffer.fill_(7)
        pool.trim()

    assert in_child(child) == 0
    buffers = [pool.acquire() for _ in range(3)]
    assert all(buffer is not None and buffer.is_pinned() for buffer in buffers)
    assert not any(buffer.any() for buffer in buffers if buffer is not None)


def test_a_slice_loads_to_the_gpu_from_its_chunks_alone(tmp_path: Path) -> None:
    torch.manual_seed(0)
    # Rows that are no multiple of a chunk, several chunks, strides, and a type of one byte.
    state = {
        "rows": torch.randn(1500, 3001),
        "turned": torch.randn(900, 1700).t(),
        "bytes": torch.randint(0, 255, (9_000_001,), dtype=torch.uint8),
        "one": torch.tensor(2.5),
    }
    checkpoint.save(tmp_path / "a", state, rng=False)
    into = {name: torch.zeros_like(tensor, device="cuda") for name, tensor in state.items()}
    into["turned"] = torch.zeros(1700, 900, device="cuda")
    checkpoint.load_into(tmp_path / "a", into)
    for name, tensor in state.items():
        assert torch.equal(into[name].cpu(), tensor)
