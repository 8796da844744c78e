"""The backend gives what gloo gives, in every collective, group and type that torch offers."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

import hfreduce
from hfreduce.backend import ProcessGroup
from tests.hfreduce.ranks import Ranks, drop_group, run

OPS = [dist.ReduceOp.SUM, dist.ReduceOp.MIN, dist.ReduceOp.MAX, dist.ReduceOp.PRODUCT]
TYPES = [torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8]


def start(rank: int, world: int, store: str, **options: Any) -> None:
    warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 has new names for some
    dist.init_process_group(
        "hfreduce", store=dist.FileStore(store, world), rank=rank, world_size=world, **options
    )


def values(rank: int, dtype: torch.dtype, count: int = 60) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(0, 4, (count,), generator=generator).to(dtype)


def collectives(group: dist.ProcessGroup, rank: int, world: int) -> list[Tensor]:
    """Call everything on a group and return all results."""
    results = []
    for dtype in TYPES:
        for op in OPS:
            tensor = values(rank, dtype)
            dist.all_reduce(tensor, op, group=group)
            results.append(tensor)
            tensor = values(rank, dtype)
            dist.reduce(tensor, 1, op, group=group)
            if rank == 1:
                results.append(tensor)
        tensor = values(rank, dtype)
        dist.broadcast(tensor, 1, group=group)
        results.append(tensor)
        parts = [torch.empty_like(tensor) for _ in range(world)]
        dist.all_gather(parts, values(rank, dtype), group=group)
        results += parts
        whole = torch.empty(60 * world, dtype=dtype)
        dist.all_gather_into_tensor(whole, values(rank, dtype), group=group)
        results.append(whole)
        received = [torch.empty_like(tensor) for _ in range(world)] if rank == 1 else None
        dist.gather(values(rank, dtype), received, dst=1, group=group)
        results += received or []
        sent = [values(10 + peer, dtype) for peer in range(world)] if rank == 1 else None
        dist.scatter(tensor, sent, src=1, group=group)
        results.append(tensor)
        works = []
        for step in range(4):
            tensor = values(rank + step, dtype)
            works.append((dist.all_reduce(tensor, group=group, async_op=True), tensor))
        for work, tensor in works:
            work.wait()
            assert work.is_completed()
            results.append(tensor)
        exchanged = torch.empty(60, dtype=dtype)
        dist.all_to_all_single(exchanged, values(rank, dtype), group=group)
        results.append(exchanged)
    pair = [torch.full((3,), float(rank)), torch.full((5,), float(rank))]
    dist.all_reduce_coalesced(pair, group=group)
    results += pair
    moved = torch.full((4,), float(rank))
    if rank == 0:
        dist.send(moved, 1, group=group)
    elif rank == 1:
        dist.recv(moved, 0, group=group)
    results.append(moved)
    complexes = torch.full((4,), complex(rank, 1))
    dist.all_reduce(complexes, group=group)
    results.append(complexes)
    dist.barrier(group=group)
    return results


def parity(rank: int, world: int, store: str) -> None:
    start(rank, world, store)
    gloo = dist.new_group(backend="gloo")
    ours = collectives(dist.group.WORLD, rank, world)
    assert dist.group.WORLD._reducer is not None, "hfreduce had no part in it"
    for a, b in zip(ours, collectives(gloo, rank, world), strict=True):
        assert torch.equal(a, b)
    drop_group()


def test_every_collective_gives_what_gloo_gives() -> None:
    run(parity, 3)


def what_gloo_has_not(rank: int, world: int, store: str) -> None:
    start(rank, world, store)
    average = torch.full((100,), float(rank), dtype=torch.bfloat16)
    dist.all_reduce(average, dist.ReduceOp.AVG)
    assert (average == (world - 1) / 2).all()
    part = torch.empty(10)
    dist.reduce_scatter_tensor(part, torch.arange(10.0 * world), dist.ReduceOp.AVG)
    assert torch.equal(part, torch.arange(10.0) + 10 * rank)
    parts = [torch.ones(1 + peer) * (rank + 1) for peer in range(world)]
    mine = torch.empty(1 + rank)
    dist.reduce_scatter(mine, parts)
    assert (mine == sum(range(1, world + 1))).all()
    sizes = [torch.empty(1 + peer) for peer in range(world)]
    dist.all_gather(sizes, mine)
    assert all((tensor == mine[0]).all() for tensor in sizes)
    narrow = torch.ones(64).to(torch.float8_e4m3fn)
    dist.all_reduce(narrow)
    assert (narrow.float() == world).all()
    drop_group()


def test_averages_narrow_types_and_uneven_parts_work_beyond_gloo() -> None:
    run(what_gloo_has_not, 2)


def objects_and_groups(rank: int, world: int, store: str) -> str:
    start(rank, world, store)
    assert dist.get_backend() == "hfreduce"
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "text": "x" * rank * 1000})
    assert [entry["rank"] for entry in everyone] == list(range(world))
    given = [f"from {rank}", rank]
    dist.broadcast_object_list(given, src=2)
    assert given == ["from 2", 2]
    got: list[Any] = [None]
    dist.scatter_object_list(got, [f"to {peer}" for peer in range(world)], src=0)
    assert got == [f"to {rank}"]
    even, odd = dist.new_group([0, 2]), dist.new_group([1, 3])
    mine = even if rank % 2 == 0 else odd
    assert dist.get_backend(mine) == "hfreduce"
    tensor = torch.tensor([float(rank)])
    dist.all_reduce(tensor, group=mine)
    assert tensor == (2.0 if rank % 2 == 0 else 4.0)
    dist.broadcast(tensor, src=3 if rank % 2 else 2, group=mine)  # by its global rank
    before = threading.active_count()
    dist.destroy_process_group(mine)
    assert threading.active_count() <= before
    dist.barrier()
    drop_group()
    gc.collect()
    return Path("/proc/self/maps").read_text()


def test_objects_and_subgroups_work_and_the_end_leaves_nothing_mapped() -> None:
    for maps in run(objects_and_groups, 4):
        assert "memfd:hfreduce" not in maps.replace("/hfreduce/", "/")


def in_cpp(rank: int, world: int, store: str) -> None:
    start(rank, world, store)
    group = dist.group.WORLD
    assert (functional.all_reduce(torch.ones(4), "sum", group) == world).all()
    gathered = functional.all_gather_tensor(torch.full((2,), float(rank)), 0, group)
    assert gathered.tolist() == [float(peer) for peer in range(world) for _ in range(2)]
    part = functional.reduce_scatter_tensor(torch.ones(2 * world), "sum", 0, group)
    assert (part == world).all()
    model = nn.parallel.DistributedDataParallel(nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1)))
    model(torch.full((2, 3), float(rank))).sum().backward()
    assert torch.equal(model.module[1].bias.grad, torch.tensor([2.0]))
    drop_group()


def test_torchs_own_ddp_and_functional_collectives_go_through_it() -> None:
    run(in_cpp, 2)


def sharded(rank: int, world: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    start(rank, world, store)
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8) for _ in range(3)]
    plain = nn.Sequential(*layers)
    expected = [parameter.detach().clone() for parameter in plain.parameters()]
    batches = [torch.randn(4, 8) for _ in range(world)]
    for layer in layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(plain, mesh=mesh)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    plain(batches[rank]).square().mean().backward()
    optimizer.step()
    alone = nn.Sequential(*[nn.Linear(8, 8) for _ in range(3)])
    for parameter, value in zip(alone.parameters(), expected, strict=True):
        parameter.data.copy_(value)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    alone(torch.cat(batches)).square().mean().backward()
    optimizer.step()
    for a, b in zip(plain.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(a.full_tensor(), b.detach())  # type: ignore[attr-defined]
    drop_group()


def test_fsdp2_and_device_meshes_train_on_it() -> None:
    run(sharded, 2)


def mixed(rank: int, world: int, store: str) -> None:
    dist.init_process_group(
        "cpu:hfreduce",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
    )
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == world).all()
    drop_group()


def test_it_may_be_named_for_the_cpu_alone() -> None:
    run(mixed, 2)


def one_dies(rank: int, world: int, store: str) -> str:
    start(rank, world, store)
    group = dist.new_group([1, 2])
    if rank == 0:
        return ""
    dist.all_reduce(torch.ones(4), group=group)
    if rank == 2:
        os._exit(1)
    with pytest.raises(hfreduce.DeadPeerError, match=r"rank 1 \(global rank 2\) \(pid \d+\)"):
        dist.all_reduce(torch.ones(4), group=group)
    work = dist.all_reduce(torch.ones(4), group=group, async_op=True)
    with pytest.raises(hfreduce.DeadPeerError):
        work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), hfreduce.DeadPeerError)
    return "named"


def test_a_dead_rank_is_named_by_its_number_in_the_group_and_in_all() -> None:
    assert Ranks(one_dies, 3).join()[1].value == "named"


def no_engine(rank: int, world: int, store: str) -> str:
    from hfreduce import segment

    if rank == 1:
        segment.MISSING = "No module named 'hfreduce._engine'"
    start(rank, world, store)
    tensor = torch.ones(5)
    dist.all_reduce(tensor)
    assert (tensor == world).all(), "gloo did not take over"
    group = dist.group.WORLD
    assert isinstance(group, ProcessGroup)
    with pytest.raises(hfreduce.UnavailableError) as caught:
        _ = group.reducer
    drop_group()
    return str(caught.value)


def test_where_a_rank_has_no_engine_gloo_takes_over_on_all() -> None:
    for said in run(no_engine, 2):
        assert "rank 1 has no native engine" in said
        assert "install hfai on Linux" in said


def test_without_the_engine_it_imports_and_says_what_is_missing_when_it_is_used() -> None:
    program = (
        "import sys, json\n"
        "sys.modules['hfreduce._engine'] = None\n"
        "import hfreduce, torch.distributed as dist, haiscale.ddp\n"
        "try: hfreduce.Reducer(dist.HashStore(), 0, 1)\n"
        "except hfreduce.UnavailableError as error: said = str(error)\n"
        "print(json.dumps([hfreduce.is_available(), said]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    available, said = json.loads(done.stdout)
    assert not available
    assert "rank 0 has no native engine" in said


def test_importing_starts_no_thread_and_registers_the_backend_once() -> None:
    program = (
        "import importlib, json, os, torch.distributed as dist\n"
        "count = lambda: len(os.listdir('/proc/self/task'))\n"
        "before = count()\n"
        "import hfreduce\n"
        "importlib.reload(hfreduce)\n"
        "print(json.dumps([count() - before, dist.Backend.backend_list.count('hfreduce'),\n"
        "                  'libcuda.so' in open('/proc/self/maps').read()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [0, 1, False]


def power_sgd(rank: int, world: int, store: str, backend: str) -> list[list[float]]:
    dist.init_process_group(
        backend,
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=30),
    )
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(64, 64))
    state = powerSGD_hook.PowerSGDState(None, 1, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(5):
        generator = torch.Generator().manual_seed(10 * step + rank)
        model(torch.randn(4, 64, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found = [parameter.flatten().tolist() for parameter in model.parameters()]
    time.sleep(0.3)  # gloo's thread needs the GIL for its last tensors, and torch joins it with it
    drop_group()
    return found


def test_a_hook_whose_callbacks_make_collectives_trains_as_on_gloo() -> None:
    expected = run(power_sgd, 2, "gloo")
    found = run(power_sgd, 2, "hfreduce")
    for ours, theirs in zip(found, expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(torch.tensor(a), torch.tensor(b))


def new_timeout(rank: int, world: int, store: str) -> None:
    start(rank, world, store, timeout=timedelta(seconds=60))
    group: Any = dist.group.WORLD
    dist.all_reduce(torch.ones(3))
    group.set_timeout(timedelta(seconds=0.6))
    if rank == 1:
        time.sleep(2.5)
        return
    started = time.monotonic()
    with pytest.raises(hfreduce.LatePeerError, match=r"rank 1 .* within 0\.6 s"):
        dist.all_reduce(torch.ones(3))
    with pytest.raises(RuntimeError, match="imed out"):  # gloo's, which multiplies
        dist.all_reduce(torch.ones(3), dist.ReduceOp.PRODUCT)
    assert time.monotonic() - started < 2.4


def test_set_timeout_counts_for_the_reducer_and_for_gloo() -> None:
    run(new_timeout, 2)
