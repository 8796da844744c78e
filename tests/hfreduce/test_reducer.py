"""Collectives of real processes, against what plain torch computes from all ranks' tensors."""

from __future__ import annotations

import gc
import hashlib
import os
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch import distributed as dist

import hfreduce
from tests.hfreduce.ranks import drop_group, reducer, run

CHUNK = 64 << 10  # the smallest: more chunks than slots even in small tensors
SIZES = [0, 1, 63, 64, 1000, 8_192, 16_385, 400_001]


def data(rank: int, count: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Return a rank's tensor: any rank can make any other's."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return (torch.randn(count, generator=generator) * 5).to(dtype)


def summed(parts: list[Tensor]) -> Tensor:
    wide = torch.float32 if parts[0].is_floating_point() else parts[0].dtype
    total = parts[0].to(wide)
    for part in parts[1:]:
        total = total + part.to(wide)
    return total


def all_collectives(rank: int, world: int, store: str, threads: int, chunk: int) -> int:
    group = reducer(rank, world, store, threads=threads, chunk_bytes=chunk)
    checks = 0
    for count in SIZES:
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2, torch.int64):
            parts = [data(peer, count, dtype) for peer in range(world)]
            total, mine = summed(parts), parts[rank]
            for op in ("sum", "avg", "max"):
                if op == "avg" and dtype == torch.int64:
                    continue
                expected = total / world if op == "avg" else total
                if op == "max":
                    expected = torch.stack([part.double() for part in parts]).amax(0)
                result = mine.clone()
                group.all_reduce(result, op)
                assert torch.equal(result.float(), expected.to(dtype).float()), (count, dtype, op)
                result, root = mine.clone(), count % world
                group.reduce(result, root, op)
                wanted = expected.to(dtype) if rank == root else mine
                assert torch.equal(result.float(), wanted.float()), (count, dtype, op)
            root = (count + 1) % world
            result = mine.clone()
            group.broadcast(result, root)
            assert torch.equal(result.float(), parts[root].float())
            results = [torch.zeros_like(part) for part in parts]
            group.all_gather(results, mine)
            assert torch.equal(torch.stack(results).float(), torch.stack(parts).float())
            together = torch.zeros(world * count).to(dtype)
            group.all_gather(together, mine)
            assert torch.equal(together.float(), torch.cat([part.float() for part in parts]))
            received = [torch.zeros_like(part) for part in parts] if rank == root else None
            group.gather(mine, received, root)
            if received is not None:
                assert torch.equal(torch.stack(received).float(), torch.stack(parts).float())
            result = torch.zeros_like(mine)
            group.scatter(result, parts if rank == root else None, root)
            assert torch.equal(result.float(), mine.float())
            result = torch.zeros_like(mine)
            rows = [[data(peer, count, dtype, to) for to in range(world)] for peer in range(world)]
            group.reduce_scatter(result, rows[rank])
            expected = summed([rows[peer][rank] for peer in range(world)]).to(dtype)
            assert torch.equal(result.float(), expected.float())
            checks += 1
        group.barrier()
    return checks


@pytest.mark.parametrize(
    ("world", "threads", "chunk"),
    [(1, 1, CHUNK), (2, 1, CHUNK), (3, 1, 256 << 10), (4, 3, CHUNK)],
)
def test_every_collective_gives_what_torch_computes(world: int, threads: int, chunk: int) -> None:
    assert run(all_collectives, world, threads, chunk) == [len(SIZES) * 4] * world


def uneven(rank: int, world: int, store: str, threads: int) -> None:
    group = reducer(rank, world, store, threads=threads, chunk_bytes=CHUNK)
    for counts in ([5, 0, 70_001], [1_000_000, 3, 300_000], [0, 0, 0]):
        parts = [data(peer, count) for peer, count in enumerate(counts)]
        results = [torch.zeros_like(part) for part in parts]
        group.all_gather(results, parts[rank])
        assert all(torch.equal(a, b) for a, b in zip(results, parts, strict=True))
        rows = [[data(p, count, seed=to) for to, count in enumerate(counts)] for p in range(world)]
        result = torch.zeros(counts[rank])
        group.reduce_scatter(result, rows[rank], "avg")
        assert torch.equal(result, summed([rows[peer][rank] for peer in range(world)]) / world)


@pytest.mark.parametrize("threads", [1, 2])
def test_parts_of_different_sizes_are_gathered_and_scattered(threads: int) -> None:
    run(uneven, 3, threads)


def same_bits(rank: int, world: int, store: str) -> str:
    group = reducer(rank, world, store, threads=1 + rank % 2)  # rank 0's number counts
    digest = hashlib.sha256()
    for dtype in (torch.float32, torch.bfloat16):
        for count in (100, 100_003):
            for op in ("sum", "avg"):
                result = data(rank, count, dtype)
                group.all_reduce(result, op)
                digest.update(result.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def test_all_ranks_and_runs_get_the_same_bits() -> None:
    assert len({*run(same_bits, 3), *run(same_bits, 3)}) == 1


def asynchronous(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    tensors = [data(rank, 50_000, seed=i) for i in range(30)]
    handles = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    late = torch.full((3,), float(rank))
    group.all_reduce(late)  # after those before it
    assert late[0] == sum(range(world))
    assert all(handle is not None and handle.done() for handle in handles)
    for i, (tensor, handle) in enumerate(zip(tensors, handles, strict=True)):
        assert handle is not None
        handle.wait()
        parts = [data(peer, 50_000, seed=i) for peer in range(world)]
        assert torch.equal(tensor, summed(parts))
    last = group.barrier(async_op=True)
    assert last is not None
    last.wait(30)


def test_asynchronous_calls_are_carried_out_in_order() -> None:
    run(asynchronous, 2)


def strides(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    base = torch.full((40, 30), float(rank + 1), requires_grad=True)
    for view in (base.detach().t(), base.detach()[::2, 1::3], base.detach().expand(3, 40, 30)[0]):
        view.fill_(rank + 1.0)
        group.all_reduce(view)
        assert (view == sum(range(1, world + 1))).all()
    outside = torch.full((10, 10), -1.0)
    group.broadcast(outside[:, 3], 0)
    assert (outside[:, 4:] == -1).all()
    parts = torch.zeros(world, 8).t()
    group.all_gather([parts[:, peer] for peer in range(world)], torch.full((8,), float(rank)))
    assert torch.equal(parts, torch.arange(world).float().expand(8, world))
    scalar = torch.tensor(float(rank))
    group.all_reduce(scalar, dist.ReduceOp.MAX)
    assert scalar == world - 1
    flags = torch.tensor([rank == 1, True])
    group.broadcast(flags, 1)
    assert flags.tolist() == [True, True]


def test_tensors_of_any_strides_and_types_travel() -> None:
    run(strides, 2)


def refusals(rank: int, world: int, store: str) -> list[str]:
    group = reducer(rank, world, store)
    tries: list[Any] = [
        lambda: group.all_reduce([1.0]),
        lambda: group.all_reduce(torch.ones(2, dtype=torch.complex64)),
        lambda: group.all_reduce(torch.ones(2), "product"),
        lambda: group.all_reduce(torch.ones(2, dtype=torch.int32), "avg"),
        lambda: group.all_reduce(torch.ones(2, device="meta")),
        lambda: group.all_reduce(torch.ones(2).to_sparse()),
        lambda: group.broadcast(torch.ones(2), 2),
        lambda: group.broadcast(torch.ones(2), -1),
        lambda: group.all_gather([torch.ones(2)], torch.ones(2)),
        lambda: group.all_gather([torch.ones(3), torch.ones(3)], torch.ones(2)),
        lambda: group.all_gather([torch.ones(2), torch.ones(2).int()], torch.ones(2)),
        lambda: group.all_gather(torch.ones(5), torch.ones(2)),
        lambda: group.reduce_scatter(torch.ones(2), torch.ones(7)),
        lambda: group.gather(torch.ones(2), None, rank),
        lambda: group.scatter(torch.ones(2), [torch.ones(2), torch.ones(4)], rank),
        lambda: group.set_timeout(-1),
    ]
    said = []
    for attempt in tries:
        try:
            attempt()
        except (TypeError, ValueError) as error:
            said.append(str(error))
        else:
            said.append("")
    group.barrier()  # nothing of it has broken the group
    return said


def test_what_cannot_be_is_refused_in_words_before_anyone_waits() -> None:
    words = (
        "a list was given where a torch.Tensor is needed",
        "torch.complex64 cannot be reduced: use one of float32",
        "op='product' is not known: choose one of sum, avg, min, max",
        "an average of torch.int32 is not an integer",
        "a tensor on meta was given",
        "a tensor of layout torch.sparse_coo was given",
        "there is no rank 2: the group has 2, from 0",
        "there is no rank -1",
        "outputs has 1 tensors for 2 ranks",
        "bytes and this rank's tensor",
        "outputs[1] is torch.int32, the tensor is torch.float32",
        "outputs has 5 elements, which 2 ranks cannot share evenly",
        "inputs has 7 elements",
        "gathers: it needs gather_list",
        "elements, the tensor 2",
        "timeout=-1 is not a positive number",
    )
    for said in run(refusals, 2):
        for got, wanted in zip(said, words, strict=True):
            assert wanted in got


def test_senseless_groups_are_refused(tmp_path: Any) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    for options, words in (
        ({"rank": 1, "world_size": 1}, "rank=1 is not in 0 … 0"),
        ({"rank": 0, "world_size": 1, "timeout": 0}, "timeout=0"),
        ({"rank": 0, "world_size": 1, "threads": 0}, "threads=0"),
        ({"rank": 0, "world_size": 1, "chunk_bytes": 100}, "chunk_bytes=100"),
        ({"rank": 0, "world_size": 5000}, "at most 512"),
    ):
        with pytest.raises(ValueError, match=words):
            hfreduce.Reducer(store, **options)


def test_nothing_is_left_of_a_reducer(tmp_path: Any) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)

    def opened() -> list[int]:
        maps = Path("/proc/self/maps").read_text().count("memfd:hfreduce")
        return [len(os.listdir("/proc/self/fd")), threading.active_count(), maps]

    before = opened()
    for _ in range(3):
        group = hfreduce.Reducer(store, 0, 1)
        handle = group.all_reduce(torch.ones(10), async_op=True)
        assert handle is not None
        handle.wait()
        assert opened()[2] == 1
        del group, handle
        gc.collect()
    assert opened() == before


def test_a_closed_reducer_says_so(tmp_path: Any) -> None:
    with hfreduce.Reducer(dist.FileStore(str(tmp_path / "store"), 1), 0, 1) as group:
        group.barrier()
    with pytest.raises(RuntimeError, match="barrier: this Reducer is closed"):
        group.barrier()
    handle = group.all_reduce(torch.ones(3), async_op=True)
    assert handle is not None
    with pytest.raises(RuntimeError, match="all_reduce: this Reducer is closed"):
        handle.wait()
    group.close()  # again: nothing happens


def test_a_reducer_cannot_be_pickled(tmp_path: Any) -> None:
    group = hfreduce.Reducer(dist.FileStore(str(tmp_path / "store"), 1), 0, 1)
    with pytest.raises(TypeError, match="belongs to its process"):
        pickle.dumps(group)


def several_groups(rank: int, world: int, store: str) -> None:
    shared = dist.FileStore(store, world)
    groups = [hfreduce.Reducer(shared, rank, world, timeout=30) for _ in range(3)]
    pairs = hfreduce.Reducer(shared, rank % 2, 2, timeout=30, name=f"pair {rank // 2}")
    for turn in range(20):
        for weight, group in enumerate(groups, start=1):
            tensor = torch.full((20_000,), float(weight))
            group.all_reduce(tensor)
            assert (tensor == weight * world).all()
        tensor = torch.full((5,), float(rank + turn))
        pairs.all_reduce(tensor)
        assert (tensor == rank // 2 * 4 + 1 + 2 * turn).all()


def test_groups_of_one_name_and_of_several_do_not_meet() -> None:
    run(several_groups, 4)


def through_another_group(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    group = hfreduce.Reducer.from_group(timeout=30)
    tensor = torch.ones(1000)
    group.all_reduce(tensor)
    assert (tensor == world).all()
    drop_group()


def test_a_reducer_is_made_from_a_process_group() -> None:
    run(through_another_group, 2)
