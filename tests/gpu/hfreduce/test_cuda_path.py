"""All-reduces of GPU tensors, by ranks that share one GPU or have one each."""

from __future__ import annotations

import copy
import os
import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

import hfreduce
from haiscale.ddp import DistributedDataParallel
from hfreduce import topology
from tests.hfreduce.ranks import Ranks, reducer, run

CHUNK = 256 << 10
SIZES = [0, 1, 1000, 65_536, 65_537, 1_000_003]


def device(rank: int) -> torch.device:
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def data(rank: int, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator) * 5).to(dtype)


def summed(parts: list[Tensor]) -> Tensor:
    """Return the sum as it is defined: in float32 in the order of ranks, rounded once."""
    wide = torch.float32 if parts[0].is_floating_point() else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def sums(rank: int, world: int, store: str, flags: bool) -> bool:
    group, gpu = reducer(rank, world, store), device(rank)
    path = group.gpu(gpu, chunk_bytes=CHUNK, flags=flags)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2, torch.int32):
        for count in SIZES:
            parts = [data(peer, count, dtype) for peer in range(world)]
            for op in ("sum", "avg", "max"):
                if op == "avg" and not dtype.is_floating_point:
                    continue
                expected = summed(parts) / world if op == "avg" else summed(parts)
                if op == "max":
                    expected = torch.stack([part.double() for part in parts]).amax(0)
                result = parts[rank].to(gpu)
                group.all_reduce(result, op)
                assert torch.equal(result.cpu().float(), expected.to(dtype).float()), (dtype, count)
    return path.flags


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("flags", [True, False], ids=["words", "events"])
def test_sums_have_the_defined_bits(world: int, flags: bool) -> None:
    used = run(sums, world, flags, timeout=120)
    assert used == [flags] * world, "the driver has no stream memory operations"


def test_a_gpus_place_on_the_bus_is_known_to_sysfs() -> None:
    address = topology.address(torch.device("cuda", 0))
    there = [path.name for path in (topology.SYSFS / "bus/pci/devices").glob("*")]
    if not address or not there:
        pytest.skip("this version of torch does not say it, or this machine shows no bus")
    assert address in there


def one_rank(rank: int, world: int, store: str) -> None:
    group, gpu = reducer(rank, world, store), device(rank)
    tensor = torch.randn(1_000_003, device=gpu)
    before = tensor.clone()
    group.gpu(gpu, chunk_bytes=CHUNK).all_reduce(tensor, "sum").wait()
    assert torch.equal(tensor, before)


def test_one_rank_gets_its_tensor_back() -> None:
    run(one_rank, 1)


def in_order(rank: int, world: int, store: str) -> None:
    group, gpu = reducer(rank, world, store), device(rank)
    x = torch.full((3_000_000,), float(rank + 1), device=gpu)
    big = torch.randn(4096, 4096, device=gpu)
    for _ in range(20):
        for _ in range(5):
            big = torch.tanh(big @ big)  # work before which the tensor is not ready
        x = x * 2
        group.all_reduce(x, "avg")
        x = x + 1  # and work after it, without the host's waiting
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x = x - 1
        torch.cuda.current_stream().wait_stream(side)
    handles = []
    # Every other one is enqueued by another thread, and the rest take their turn behind it.
    tensors = [
        torch.full((2_000_000 if i % 2 else 100_000,), float(rank + i), device=gpu)
        for i in range(30)
    ]
    for tensor in tensors:
        handles.append(group.all_reduce(tensor, async_op=True, apart=True))
    for i, (tensor, handle) in enumerate(zip(tensors, handles, strict=True)):
        assert handle is not None
        handle.wait()
        assert (tensor == sum(peer + i for peer in range(world))).all()
    twice = torch.full((3_000_000,), float(rank + 1), device=gpu)
    for handle in [group.all_reduce(twice, async_op=True) for _ in range(4)]:
        assert handle is not None
        handle.wait()
    total = sum(range(1, world + 1))
    assert (twice == total * world**3).all(), "a call goes out before the one before is back"
    mean = sum(range(1, world + 1)) / world
    assert (x == mean * 2**20).all()


def test_calls_take_their_place_in_the_streams() -> None:
    run(in_order, 2, timeout=120)


def traced(rank: int, world: int, store: str) -> list[str]:
    group, gpu = reducer(rank, world, store), device(rank)
    tensor = torch.ones(10_000_000, device=gpu)
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        group.all_reduce(tensor)
        torch.cuda.synchronize()
    events: Any = profile.events()
    on_gpu = [event.name for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    assert any("Memcpy DtoH" in name for name in on_gpu), on_gpu
    return [name for name in on_gpu if not name.startswith(("Memcpy", "Memset"))]


def test_no_kernel_runs() -> None:
    assert run(traced, 2, timeout=120) == [[], []]


def killed(rank: int, world: int, store: str) -> float:
    group, gpu = reducer(rank, world, store, timeout=20), device(rank)
    tensor = torch.ones(20_000_000, device=gpu)
    group.all_reduce(tensor)
    torch.cuda.synchronize()
    group.barrier()
    if rank == 1:
        os._exit(9)
    start = time.monotonic()
    group.all_reduce(tensor)
    torch.cuda.synchronize()  # the streams are let go
    time.sleep(0.1)
    with pytest.raises(hfreduce.DeadPeerError, match="rank 1"):
        group.all_reduce(tensor)
    torch.cuda.synchronize()
    return time.monotonic() - start


def test_when_a_rank_dies_streams_are_let_go_and_the_next_call_names_it() -> None:
    ended = Ranks(killed, 3).join()
    for rank in (0, 2):
        assert not ended[rank].error, ended[rank].text
        assert ended[rank].value < 5


def refusals(rank: int, world: int, store: str) -> None:
    group, gpu = reducer(rank, world, store), device(rank)
    group.all_reduce(torch.ones(5, device=gpu))
    with pytest.raises(ValueError, match="must be contiguous"):
        group.all_reduce(torch.ones(4, 4, device=gpu).t()[1:])
    with pytest.raises(ValueError, match="only all_reduce takes those of GPUs"):
        group.broadcast(torch.ones(4, device=gpu), 0)
    graph = torch.cuda.CUDAGraph()
    tensor = torch.ones(5, device=gpu)
    with pytest.raises(RuntimeError, match="cannot be captured"), torch.cuda.graph(graph):
        group.all_reduce(tensor)
    group.barrier()


def test_what_cannot_be_is_refused() -> None:
    run(refusals, 2)


def as_backend(rank: int, world: int, store: str) -> None:
    gpu = device(rank)
    dist.init_process_group(
        "hfreduce", store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    tensor = torch.full((1000,), float(rank), device=gpu)
    dist.all_reduce(tensor)
    assert (tensor == sum(range(world))).all()
    work = dist.all_reduce(tensor, dist.ReduceOp.AVG, async_op=True)
    work.wait()
    assert (tensor == sum(range(world))).all()
    dist.barrier()
    dist.destroy_process_group()


def test_the_backend_reduces_gpu_tensors() -> None:
    run(as_backend, 2)


def trains(rank: int, world: int, store: str) -> None:
    gpu = device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(5)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(6)]).to(gpu)
    results = []
    for backend in ("torch", "hfreduce"):
        ddp = DistributedDataParallel(
            copy.deepcopy(model), device_ids=[gpu.index], backend=backend, bucket_cap_mb=1
        )
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        generator = torch.Generator().manual_seed(rank)
        for step in range(6):
            batch = torch.randn(32, 512, generator=generator).to(gpu)
            if step % 3 == 0:
                with ddp.no_sync():
                    ddp(batch).square().mean().backward()
            ddp(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert ddp.path == ("hfreduce" if backend == "hfreduce" else "torch: it was asked for")
        results.append([value.clone() for value in ddp.state_dict().values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    dist.destroy_process_group()


def test_ddp_trains_as_torchs_does() -> None:
    run(trains, 2, timeout=120)


def outlived(rank: int, world: int, store: str) -> None:
    group, gpu = reducer(rank, world, store), device(rank)
    tensor = torch.full((1_000_003,), float(rank), device=gpu)
    path = group.gpu(gpu, chunk_bytes=CHUNK)
    handle = path.all_reduce(tensor, "sum")
    path.all_reduce(torch.ones(1_000_003, device=gpu), "sum")  # which nobody keeps
    torch.cuda.synchronize()
    group.barrier()
    group.close()
    future = handle.torch_future(tensor)
    future.wait()
    assert (tensor == sum(range(world))).all()
    del tensor, handle, future
    torch.cuda.empty_cache()
    again = torch.ones(1_000_003, device=gpu)
    with pytest.raises(RuntimeError, match="closed"):
        path.all_reduce(again, "sum")
    second = reducer(rank, world, store, name="second")
    second.all_reduce(again)
    assert (again == world).all()
    second.barrier()


def test_tensors_handles_and_futures_outlive_their_group() -> None:
    run(outlived, 2)
