"""How fast ranks of several machines add tensors: through hfreduce in each, against gloo alone.

    python benchmarks/allreduce_nodes.py          # 2 and 4 machines of 1 and 2 ranks, 1 Gbit/s

The machines are network namespaces of this one, each behind a link whose rate `tc` bounds and, if
asked, whose packets take a time; it needs root. gloo's all-reduce runs over all ranks, as torch's
DDP has it. hfreduce runs over TCP and over gloo, and once with the tensor in one piece: without
the overlap of a machine's own stages and the network's, which is also timed apart.
Rounds take each way in turn, and ratios are taken round by round.
"""

from __future__ import annotations

import itertools
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
from torch import Tensor, multiprocessing
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

import hfreduce
from benchmarks.harness import links, machine, stages

KIB, MIB = 1 << 10, 1 << 20
SIZES = [4 * KIB, 64 * KIB, MIB, 16 * MIB, 64 * MIB]
BASELINE = "gloo"
WHOLE = "hfreduce, in one piece"
Way = Callable[[Tensor], object]


def measure(
    rank: int, names: list[str], each: int, work: str, sizes: list[int], rounds: int
) -> None:
    """Run all cases in one rank; rank 0 writes a line of JSON for each."""
    torch.set_num_threads(1)
    node, ranks = rank // each, each * len(names)
    links.enter(names[node])
    os.environ |= {"GLOO_SOCKET_IFNAME": links.DEVICE, "HFREDUCE_NODE": str(node)}
    shared: Any = dist.FileStore(f"{work}/store", ranks)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=ranks)
    reducers = {
        "hfreduce": hfreduce.HierarchicalReducer(shared, rank, ranks, timeout=120),
        "hfreduce over gloo": hfreduce.HierarchicalReducer(
            shared, rank, ranks, timeout=120, name="gloo", network="gloo"
        ),
        WHOLE: hfreduce.HierarchicalReducer(
            shared, rank, ranks, timeout=120, name="whole", piece_bytes=1 << 40
        ),
    }
    ways: dict[str, Way] = {name: reducer.all_reduce for name, reducer in reducers.items()}
    ways[BASELINE] = lambda tensor: dist.all_reduce(tensor)
    for size in sizes:
        tensor = torch.empty(size // 4)
        for name, way in ways.items():
            tensor.fill_(rank + 1)
            way(tensor)
            if not bool((tensor == ranks * (ranks + 1) / 2).all()):
                raise RuntimeError(f"{name} adds wrongly: {ranks} ranks, {size} bytes")
        calls = max(1, min(20, 4 * MIB // size))
        seconds = torch.zeros(len(ways), rounds, dtype=torch.float64)
        order = list(ways)
        for turn in range(rounds):
            first = turn % len(order)
            for name in order[first:] + order[:first]:
                tensor.zero_()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    ways[name](tensor)
                seconds[order.index(name), turn] = (time.perf_counter() - start) / calls
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        under_way = stages.under_way(reducers["hfreduce"], tensor) if size == max(sizes) else {}
        if rank == 0:
            row = case(
                len(names), ranks, size, calls, dict(zip(order, seconds.tolist(), strict=True))
            )
            if each > 1 and under_way:
                row["stages"] = under_way
            click.echo(summary(row))
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps(row) + "\n")
    dist.barrier()
    time.sleep(0.2)
    os._exit(0)  # groups of torch's are not dropped right after a collective


def case(
    nodes: int, ranks: int, size: int, calls: int, seconds: dict[str, list[float]]
) -> dict[str, Any]:
    """Return what a result file says of a case."""
    rows = []
    for name, times in seconds.items():
        ratios = [b / a for a, b in zip(times, seconds[BASELINE], strict=True)]
        rows.append(
            {
                "name": name,
                "ms": [round(second * 1e3, 4) for second in times],
                "median_ms": round(statistics.median(times) * 1e3, 4),
                "ratio_median": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        )
    return {"skipped": False, "nodes": nodes, "ranks": ranks, "bytes": size} | {
        "calls": calls,
        "rows": rows,
    }


def summary(row: dict[str, Any]) -> str:
    """Return a line of text on a case."""
    shown = [f"{e['name']} {e['median_ms']:.2f} ms ({e['ratio_median']} x)" for e in row["rows"]]
    return (
        f"{row['nodes']} machines of {row['ranks'] // row['nodes']}, {row['bytes'] / MIB:g} MiB: "
        + " · ".join(shown)
    )


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", "counts", type=click.IntRange(2, 8), multiple=True, default=(2, 4))
@click.option(
    "--ranks", "eachs", type=click.IntRange(1, 8), multiple=True, default=(1, 2), help="A machine."
)
@click.option("--delay", default=0.0, show_default=True, help="Of each packet, in ms.")
@click.option("--rate", default="1gbit", show_default=True, help="Of each machine's link, for tc.")
@click.option("--most", type=float, default=64, show_default=True, help="MiB of the largest.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(
    counts: tuple[int, ...],
    eachs: tuple[int, ...],
    rate: str,
    delay: float,
    most: float,
    rounds: int,
    out: Path | None,
) -> None:
    """Measure all-reduces over several machines, made of network namespaces."""
    cpu = torch.device("cpu")
    sizes = [size for size in SIZES if size <= most * MIB]
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(cpu),
        "versions": machine.versions(cpu),
        "commit": machine.commit(),
        "date": machine.now(),
        "command": "python benchmarks/allreduce_nodes.py"
        + "".join(f" --nodes {count}" for count in counts)
        + "".join(f" --ranks {each}" for each in eachs)
        + f" --rate {rate}"
        + (f" --delay {delay:g}" if delay else "")
        + f" --most {most:g} --rounds {rounds}",
        "rate": rate,
        "delay_ms": delay,
        "complete": False,  # a run that is cut short keeps what it has
        "load_before": round(os.getloadavg()[0], 1),
        "cases": [],
    }
    for each, count in itertools.product(eachs, counts):
        try:
            with (
                tempfile.TemporaryDirectory() as work,
                links.linked(count, rate, delay / 1e3) as names,
            ):
                start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
                start(measure, (names, each, work, sizes, rounds), nprocs=each * count)
                lines = Path(work, "cases").read_text().splitlines()
                result["cases"] += [json.loads(line) for line in lines]
                write(result, out)
        except links.UnavailableError as error:
            click.echo(f"allreduce_nodes.py: {error}", err=True)
            sys.exit(1)
    write(result | {"complete": True}, out)


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the result file, unless none is wanted."""
    if str(out) != "-":
        directory = machine.ROOT / "benchmarks" / "results" / result["machine"]["slug"]
        path = out or directory / "allreduce_nodes.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
