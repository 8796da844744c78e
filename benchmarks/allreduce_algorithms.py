"""Which way of adding tensors between machines is fastest: everyone to everyone, ring, or tree.

    python benchmarks/allreduce_algorithms.py          # 2, 3, 4 and 8 machines; 3 minutes

The machines are network namespaces of this one, one process each, behind links whose rate `tc`
bounds and whose packets take a given time; it needs root. All ways send and receive by the same
engine (hfreduce's TCP), so that they differ in nothing else:

- everyone to everyone: what hfreduce does (`network/point_to_point.py`), in 2 rounds;
- ring: 2 (N - 1) rounds with the neighbours, the same bytes;
- double binary tree: half of the tensor up and down each of two trees, in segments that follow each
  other; a node is a leaf in one of them and not in the other;
- gloo's own all-reduce.

Rounds take each way in turn, and ratios are taken round by round.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import click
import torch
from torch import Tensor, multiprocessing
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import links, machine
from hfreduce.network import Place
from hfreduce.network.point_to_point import cut
from hfreduce.network.sums import combine
from hfreduce.network.tcp import TcpNetwork

KIB, MIB = 1 << 10, 1 << 20
SIZES = [16 * KIB, 256 * KIB, MIB, 4 * MIB]
LINKS = [("1gbit", 0.0), ("100mbit", 2.0)]  # what a machine sends a second; ms that a packet takes
SEGMENT_BYTES = 128 * KIB  # of the trees
BASELINE = "everyone to everyone"


class Ways:
    """One node's ways of adding a float32 tensor over all nodes, in place."""

    def __init__(self, network: TcpNetwork, down: TcpNetwork, rank: int, size: int) -> None:
        self._network, self._rank, self._size = network, rank, size
        self._way_down = down  # what trees send that way has lanes of its own

    def everyone(self, tensor: Tensor) -> None:
        """As hfreduce does."""
        self._network.all_reduce(tensor, "sum", out=tensor)

    def ring(self, tensor: Tensor) -> None:
        """Pass slices on to the next node, first to add them and then to hand them out."""
        rank, size = self._rank, self._size
        after, before = (rank + 1) % size, (rank - 1) % size
        slices = cut(tensor, size)
        room = torch.empty_like(slices[0])
        for step in range(size - 1):
            mine = slices[(rank - step - 1) % size]
            part = room[: mine.numel()]
            self._network.exchange(
                [(after, slices[(rank - step) % size])], [(before, part)], lane=0
            )
            combine([part, mine], mine, "sum")
        for step in range(size - 1):
            self._network.exchange(
                [(after, slices[(rank + 1 - step) % size])],
                [(before, slices[(rank - step) % size])],
                lane=0,
            )

    def trees(self, tensor: Tensor) -> None:
        """Send halves up and down two trees, all four ways at once."""
        problems: list[BaseException] = []
        threads = []
        for tree, half in enumerate(cut(tensor, 2)):
            segments = list(torch.split(half, SEGMENT_BYTES // 4)) if half.numel() else []
            summed: SimpleQueue[Tensor] = SimpleQueue()
            for way in (self._up, self._down):
                threads.append(
                    threading.Thread(target=_kept, args=(problems, way, tree, segments, summed))
                )
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if problems:
            raise problems[0]

    def gloos(self, tensor: Tensor) -> None:
        """By gloo's own all-reduce."""
        dist.all_reduce(tensor)

    def _up(self, tree: int, segments: list[Tensor], summed: SimpleQueue[Tensor]) -> None:
        parent, children = self._relatives(tree)
        rooms = [torch.empty_like(segments[0]) for _ in children] if segments else []
        for segment in segments:
            parts = [room[: segment.numel()] for room in rooms]
            if children:
                self._network.exchange([], list(zip(children, parts, strict=True)), tree)
                combine([segment, *parts], segment, "sum")
            if parent is None:
                summed.put(segment)
            else:
                self._network.exchange([(parent, segment)], [], tree)

    def _down(self, tree: int, segments: list[Tensor], summed: SimpleQueue[Tensor]) -> None:
        parent, children = self._relatives(tree)
        for at, _ in enumerate(segments):
            if parent is None:
                segment = summed.get()
            else:
                segment = segments[at]
                self._way_down.exchange([], [(parent, segment)], tree)
            if children:
                self._way_down.exchange([(child, segment) for child in children], [], tree)

    def _relatives(self, tree: int) -> tuple[int | None, list[int]]:
        """Return this node's parent and children: leaves of the first tree are high numbers."""
        size = self._size
        place = self._rank if tree == 0 else size - 1 - self._rank
        children = [child for child in (2 * place + 1, 2 * place + 2) if child < size]
        parent = (place - 1) // 2 if place else None
        if tree:
            parent = None if parent is None else size - 1 - parent
            children = [size - 1 - child for child in children]
        return parent, children


def _kept(problems: list[BaseException], way: Any, *arguments: Any) -> None:
    try:
        way(*arguments)
    except BaseException as error:  # the thread that waits raises it
        problems.append(error)


def measure(rank: int, names: list[str], work: str, rounds: int) -> None:
    """Run all sizes in one process; rank 0 writes a line of JSON for each."""
    torch.set_num_threads(1)
    size = len(names)
    links.enter(names[rank])
    os.environ["GLOO_SOCKET_IFNAME"] = links.DEVICE
    shared: Any = dist.FileStore(f"{work}/store", size)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=size)
    labels = [f"rank {peer}" for peer in range(size)]
    networks = []
    for name in ("up", "down"):
        store: Any = dist.PrefixStore(name, shared)  # type: ignore[attr-defined]
        networks.append(TcpNetwork(Place(rank, size, labels, list(range(size)), store, 120.0)))
    of = Ways(networks[0], networks[1], rank, size)
    ways = {
        BASELINE: of.everyone,
        "ring": of.ring,
        "double binary tree": of.trees,
        "gloo": of.gloos,
    }
    order = list(ways)
    for nbytes in SIZES:
        tensor = torch.empty(nbytes // 4)
        for name, way in ways.items():
            tensor.fill_(rank + 1)
            way(tensor)
            if not bool((tensor == size * (size + 1) / 2).all()):
                raise RuntimeError(f"{name} adds wrongly: {size} nodes, {nbytes} bytes")
        calls = max(1, min(10, MIB // nbytes))
        seconds = torch.zeros(len(ways), rounds, dtype=torch.float64)
        for turn in range(rounds):
            for at in range(len(order)):
                name = order[(at + turn) % len(order)]
                tensor.zero_()
                dist.barrier()
                start = time.perf_counter()
                for _ in range(calls):
                    ways[name](tensor)
                seconds[order.index(name), turn] = (time.perf_counter() - start) / calls
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        if rank == 0:
            row = case(nbytes, calls, dict(zip(order, seconds.tolist(), strict=True)))
            with Path(work, "cases").open("a") as out:
                out.write(json.dumps(row) + "\n")
    dist.barrier()
    time.sleep(0.2)
    os._exit(0)  # groups of torch's are not dropped right after a collective


def case(nbytes: int, calls: int, seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Return what a result file says of a size."""
    rows = []
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds[BASELINE], times, strict=True)]
        rows.append(
            {
                "name": name,
                "ms": [round(second * 1e3, 3) for second in times],
                "median_ms": round(statistics.median(times) * 1e3, 3),
                "ratio_median": round(statistics.median(ratios), 2),
                "ratio_range": [round(min(ratios), 2), round(max(ratios), 2)],
            }
        )
    return {"skipped": False, "bytes": nbytes, "calls": calls, "rows": rows}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--nodes", "counts", type=click.IntRange(2), multiple=True, default=(2, 3, 4, 8))
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(counts: tuple[int, ...], rounds: int, out: Path | None) -> None:
    """Measure ways of adding between machines, made of network namespaces."""
    cpu = torch.device("cpu")
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(cpu),
        "versions": machine.versions(cpu),
        "commit": machine.commit(),
        "date": machine.now(),
        "command": "python benchmarks/allreduce_algorithms.py"
        + "".join(f" --nodes {count}" for count in counts)
        + f" --rounds {rounds}",
        "complete": False,  # a run that is cut short keeps what it has
        "load_before": round(os.getloadavg()[0], 1),
        "cases": [],
    }
    for count in counts:
        for rate, delay in LINKS:
            try:
                with (
                    tempfile.TemporaryDirectory() as work,
                    links.linked(count, rate, delay / 1e3) as names,
                ):
                    start: Any = multiprocessing.spawn  # type: ignore[attr-defined]
                    start(measure, (names, work, rounds), nprocs=count)
                    lines = Path(work, "cases").read_text().splitlines()
            except links.UnavailableError as error:
                click.echo(f"allreduce_algorithms.py: {error}", err=True)
                sys.exit(1)
            for line in lines:
                row = {"nodes": count, "rate": rate, "delay_ms": delay} | json.loads(line)
                result["cases"].append(row)
                shown = [f"{e['name']} {e['median_ms']:.2f} ms" for e in row["rows"]]
                click.echo(f"{count} machines, {rate}, {delay:g} ms, {row['bytes']}: {shown}")
            write(result, out)
    write(result | {"complete": True}, out)


def write(result: dict[str, Any], out: Path | None) -> None:
    """Write the result file, unless none is wanted."""
    if str(out) != "-":
        directory = machine.ROOT / "benchmarks" / "results" / result["machine"]["slug"]
        path = out or directory / "allreduce_algorithms.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
