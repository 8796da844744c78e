"""What a step of HostAdamW costs on the CPU, against torch's AdamW.

    python benchmarks/host_adamw.py           # 1 and 2 ranks, float32 and bfloat16; 1 minute

The parameters are those of a transformer of 12 layers of 384. One rank: torch's AdamW, fused and
foreach, on the same gradients. Several ranks: torch's after the gradients were averaged through
hfreduce in buckets of 25 MiB, which is what DDP and its hook do; HostAdamW averages and steps in
one. In bfloat16 torch's has no master weights, so its step reads and writes less than HostAdamW's.
Rounds take each way in turn, and ratios are taken round by round.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

import hfreduce
from benchmarks.harness import machine
from haiscale.host_adamw import BUCKET_BYTES, HostAdamW

WIDTH, LAYERS = 384, 12
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    """Return a model's parameters with gradients."""
    torch.manual_seed(0)
    shapes = [(4 * WIDTH, WIDTH), (4 * WIDTH,), (WIDTH, 4 * WIDTH), (WIDTH,)]
    shapes += [(3 * WIDTH, WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), *[(WIDTH,)] * 5]
    made = [nn.Parameter(torch.randn(s).to(dtype)) for _ in range(LAYERS) for s in shapes]
    for param in made:
        param.grad = torch.randn_like(param)
    return made


def averaged(reducer: hfreduce.Reducer, params: list[nn.Parameter]) -> Callable[[], None]:
    """Return what averages the gradients in buckets that they are views of, as DDP's are."""
    buckets: list[Tensor] = []
    at = 0
    while at < len(params):
        end, size = at, 0
        while end < len(params) and (end == at or size + params[end].nbytes <= BUCKET_BYTES):
            size += params[end].nbytes
            end += 1
        bucket = torch.cat([p.grad.view(-1) for p in params[at:end] if p.grad is not None])
        parts = torch.split(bucket, [param.numel() for param in params[at:end]])
        for param, part in zip(params[at:end], parts, strict=True):
            param.grad = part.view(param.shape)
        buckets.append(bucket)
        at = end

    def average() -> None:
        handles = [reducer.all_reduce(bucket, "avg", async_op=True) for bucket in buckets]
        for handle in handles:
            assert handle is not None
            handle.wait()

    return average


def ways_of(dtype: torch.dtype, reducer: hfreduce.Reducer | None) -> dict[str, Callable[[], Any]]:
    """Return the steps that are compared, each with parameters of its own."""
    ours = HostAdamW(parameters(dtype), lr=1e-4, reducer=reducer)
    ways: dict[str, Callable[[], Any]] = {"HostAdamW": ours.step}
    for kind in ("fused", "foreach"):
        params = parameters(dtype)
        average = averaged(reducer, params) if reducer is not None else None
        theirs = torch.optim.AdamW(
            params, lr=1e-4, fused=kind == "fused", foreach=kind == "foreach"
        )

        def step(average: Any = average, theirs: Any = theirs) -> None:
            if average is not None:
                average()
            theirs.step()

        ways[f"torch's, {kind}"] = step
    return ways


def measure(rank: int, world: int, work: str, rounds: int) -> None:
    """Run all cases in one rank; rank 0 writes a line of JSON for each."""
    torch.set_num_threads(1)
    reducer = None
    if world > 1:
        store: Any = dist.FileStore(f"{work}/store", world)  # type: ignore[attr-defined]
        reducer = hfreduce.Reducer(store, rank, world, timeout=120)
    for label, dtype in DTYPES.items():
        ways = ways_of(dtype, reducer)
        order = list(ways)
        for way in ways.values():
            way()
        seconds = torch.zeros(len(ways), rounds, dtype=torch.float64)
        for turn in range(rounds):
            for at in range(len(order)):
                name = order[(at + turn) % len(order)]
                if reducer is not None:
                    reducer.barrier()
                start = time.perf_counter()
                for _ in range(3):
                    ways[name]()
                seconds[order.index(name), turn] = (time.perf_counter() - start) / 3
        if reducer is not None:
            reducer.all_reduce(seconds, "max")
        if rank == 0:
            row = case(world, label, dict(zip(order, seconds.tolist(), strict=True)))
            shown = [f"{e['name']} {e['median_ms']} ms ({e['ratio_median']})" for e in row["rows"]]
            click.echo(f"{world} ranks, {label}: {' · '.join(shown)}")
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps(row) + "\n")
    if reducer is not None:
        reducer.barrier()


def case(world: int, dtype: str, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return what a result file says of a case: ratios are HostAdamW's time over another's."""
    rows = []
    for name, times in seconds.items():
        ratios = [ours / theirs for ours, theirs in zip(seconds["HostAdamW"], times, strict=True)]
        rows.append(
            {
                "name": name,
                "ms": [round(second * 1e3, 3) for second in times],
                "median_ms": round(statistics.median(times) * 1e3, 2),
                "ratio_median": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        )
    return {"skipped": False, "ranks": world, "dtype": dtype, "rows": rows}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(rounds: int, out: Path | None) -> None:
    """Measure optimizer steps on the CPU."""
    cpu = torch.device("cpu")
    result: dict[str, Any] = {
        "operator": "host_adamw",
        "machine": machine.describe(cpu),
        "versions": machine.versions(cpu),
        "commit": machine.commit(),
        "date": machine.now(),
        "command": f"python benchmarks/host_adamw.py --rounds {rounds}",
        "complete": True,
        "parameters": sum(param.numel() for param in parameters(torch.float32)),
        "load_before": round(os.getloadavg()[0], 1),
        "cases": [],
    }
    for world in (1, 2):
        with tempfile.TemporaryDirectory() as work:
            start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
            start(measure, (world, work, rounds), nprocs=world)
            lines = Path(work, "cases").read_text().splitlines()
            result["cases"] += [json.loads(line) for line in lines]
    if str(out) != "-":
        directory = machine.ROOT / "benchmarks" / "results" / result["machine"]["slug"]
        path = out or directory / "host_adamw.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
