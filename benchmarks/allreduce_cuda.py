"""The GPU half of benchmarks/allreduce.py: copy engines and CPU sums against NCCL and gloo.

With one rank: the round trip of 1 GiB by chunk size, and what a matrix product loses while it runs.
With several: all-reduces against gloo, and against NCCL where each rank has a GPU of its own (as it
is, and with NCCL_P2P_DISABLE=1 set for the whole command, as in a machine without peer access).
Several ranks may share a GPU: then its copy engines are shared too, and only the bits mean much.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch import distributed as dist

import hfreduce

MIB = 1 << 20
CHUNKS = [MIB, 2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB]
SIZES = [64 << 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB, 1024 * MIB]
Way = Callable[[Tensor], object]


def measure(rank: int, ranks: int, work: str, rounds: int) -> None:
    """Run all cases in one rank; rank 0 writes a line of JSON for each."""
    gpu = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(gpu)
    own = torch.cuda.device_count() >= ranks
    shared: Any = dist.FileStore(f"{work}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks)

    def note(row: dict[str, Any]) -> None:
        if rank == 0:
            click.echo(json.dumps(row))
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps(row) + "\n")

    if ranks == 1:
        for chunk in CHUNKS:
            reducer = hfreduce.Reducer(shared, 0, 1, timeout=60)
            path = reducer.gpu(gpu, chunk_bytes=chunk)
            note(round_trip(path, gpu, chunk, rounds))
            if chunk == 4 * MIB:
                note(product(path, gpu, rounds))
            reducer.close()
    else:
        reducer = hfreduce.Reducer(shared, rank, ranks, timeout=60)
        ways: dict[str, Way] = {"Reducer": lambda t: reducer.all_reduce(t)}
        if own:
            nccl = dist.new_group(backend="nccl")
            ways["nccl"] = lambda t: dist.all_reduce(t, group=nccl)
        ways["gloo"] = lambda t: dist.all_reduce(t)
        for size in SIZES:
            note(all_reduces(reducer, ways, gpu, size, rounds) | {"ranks": ranks, "own_gpu": own})
    dist.barrier()
    dist.destroy_process_group()


def round_trip(path: Any, gpu: torch.device, chunk: int, rounds: int) -> dict[str, Any]:
    """Time 1 GiB to the host and back, each byte once each way."""
    tensor = torch.ones(256 * MIB, device=gpu)
    times = []
    for turn in range(rounds + 1):
        torch.cuda.synchronize()
        start = time.perf_counter()
        path.all_reduce(tensor, "sum").wait()
        torch.cuda.synchronize()
        if turn:
            times.append(time.perf_counter() - start)
    rate = tensor.nbytes / 2**30 / statistics.median(times)
    return {
        "case": "round trip of 1 GiB by one rank",
        "skipped": False,
        "chunk_bytes": chunk,
        "words": path.flags,
        "ms": [round(second * 1e3, 3) for second in times],
        "gib_per_s": round(rate, 2),
    }


def product(path: Any, gpu: torch.device, rounds: int) -> dict[str, Any]:
    """Time 8192³ bf16 products alone and while 1 GiB travels."""
    a = torch.randn(8192, 8192, device=gpu, dtype=torch.bfloat16)
    tensor = torch.ones(256 * MIB, device=gpu)
    side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def products(count: int) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(count):
            torch.mm(a, a)
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / count

    alone, beside = [], []
    products(20)
    for _ in range(rounds):
        alone.append(products(20))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            handle = path.all_reduce(tensor, "sum")
        beside.append(products(20))
        still = not handle.done()
        torch.cuda.synchronize()
        if not still:
            click.echo("the copies ended before the products: the figure is too small", err=True)
    ratios = [b / a for a, b in zip(alone, beside, strict=True)]
    return {
        "case": "8192³ bf16 product while 1 GiB travels",
        "skipped": False,
        "ms_alone": [round(ms, 4) for ms in alone],
        "ms_beside": [round(ms, 4) for ms in beside],
        "slowed_percent": round((statistics.median(ratios) - 1) * 100, 2),
    }


def all_reduces(
    reducer: hfreduce.Reducer, ways: dict[str, Way], gpu: torch.device, size: int, rounds: int
) -> dict[str, Any]:
    """Time all-reduces of a size in turn, after checking each way's sum."""
    tensor = torch.empty(size // 4, device=gpu)
    calls, names = max(1, min(20, 64 * MIB // size)), list(ways)
    for name, way in ways.items():
        tensor.fill_(reducer.rank + 1)
        way(tensor)
        if not bool((tensor == reducer.world_size * (reducer.world_size + 1) / 2).all()):
            raise RuntimeError(f"{name} adds wrongly: {size} bytes")
    times = torch.zeros(len(ways), rounds, dtype=torch.float64)
    for turn in range(rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            tensor.zero_()
            torch.cuda.synchronize()
            reducer.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                ways[name](tensor)
            torch.cuda.synchronize()
            times[names.index(name), turn] = (time.perf_counter() - start) / calls
    reducer.all_reduce(times, "max")
    rows = []
    for name, row in zip(names, times.tolist(), strict=True):
        rate = size / 2**30 / statistics.median(row)
        ms = [round(second * 1e3, 4) for second in row]
        rows.append({"name": name, "ms": ms, "gib_per_s": round(rate, 3)})
    return {
        "case": "all-reduce, fp32",
        "skipped": False,
        "bytes": size,
        "calls": calls,
        "rows": rows,
        "NCCL_P2P_DISABLE": os.environ.get("NCCL_P2P_DISABLE", ""),
    }
