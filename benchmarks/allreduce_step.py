"""What averaging a model's gradients costs the host, one rank a process on one GPU.

    python benchmarks/allreduce_step.py              # BERT-large, 8 x 512 tokens; 30 seconds

Every way is a process of its own, asked in turn. With one rank nothing is added, but everything is
enqueued, copied to the host and back as with several, so a step shows what the hook takes from a
backward pass that is bound by the host. "apart": another thread enqueues, as where nobody waits for
the call; "here": the thread that calls the hook does. "gloo" and "NCCL" say which process group DDP
was given, of which steps without averaging use nothing. "torch's hook": NCCL's all-reduce.
"""

from __future__ import annotations

import contextlib
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
from torch import distributed as dist
from torch import multiprocessing
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn import parallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

import hfreduce
from benchmarks.allreduce_ranks import model, training
from benchmarks.harness import machine
from hfreduce import cuda

MODEL = "BERT-large"
WAYS = ["NCCL, torch's hook", "gloo, apart", "gloo, here", "NCCL, apart"]
STEPS = 3


class Way:
    """One way's process: a model in DDP, with a hook that notes what it costs.

    Args:
        name: Of `WAYS`.
        work: A directory of its own.
        sequences: Of 512 tokens, a batch.
    """

    def __init__(self, name: str, work: str, sequences: int) -> None:
        torch.set_num_threads(1)
        gpu = torch.device("cuda", 0)
        torch.cuda.set_device(gpu)
        store: Any = dist.FileStore(f"{work}/store", 1)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        group: Any = dist.new_group(backend="nccl") if name.startswith("NCCL") else None
        module, run = model(MODEL, gpu, sequences)
        net = parallel.DistributedDataParallel(module, device_ids=[0], process_group=group)
        self._spent: list[float] = []
        average: Callable[[Any], Any]
        if name.endswith("torch's hook"):

            def average(bucket: Any) -> Any:
                return allreduce_hook(group, bucket)
        else:
            cuda.APART_BYTES = 0 if name.endswith("apart") else 1 << 60
            self._reducer = hfreduce.Reducer(store, 0, 1)
            path = self._reducer.gpu(gpu)

            def average(bucket: Any) -> Any:
                handle = path.all_reduce(bucket.buffer(), "avg", apart=True)
                return handle.torch_future(bucket.buffer())

        # torch compares a hook's annotations as types, which they are not in this module.
        net.register_comm_hook(None, lambda _, bucket: self._noted(average, bucket))
        self._net, self._train = net, training(net, run)
        self.step(True)

    def _noted(self, average: Callable[[Any], Any], bucket: Any) -> Any:
        start = time.perf_counter()
        future = average(bucket)
        self._spent.append((time.perf_counter() - start) * 1e6)
        return future

    def step(self, sync: bool) -> dict[str, float]:
        """Return what a step takes, with or without averaging."""
        self._spent.clear()
        torch.cuda.synchronize()
        cpu, start = time.process_time(), time.perf_counter()
        with contextlib.nullcontext() if sync else self._net.no_sync():
            for _ in range(STEPS):
                self._train()
        torch.cuda.synchronize()
        found = {
            "ms": (time.perf_counter() - start) / STEPS * 1e3,
            "cpu_ms": (time.process_time() - cpu) / STEPS * 1e3,
        }
        if sync:
            found |= {
                "buckets": len(self._spent) / STEPS,
                "hook_us": statistics.median(self._spent),
            }
        return {name: round(value, 2) for name, value in found.items()}


def serve(pipe: Any, name: str, work: str, sequences: int) -> None:
    """Answer with a step each time."""
    way = Way(name, work, sequences)
    pipe.send("ready")
    while (sync := pipe.recv()) is not None:
        pipe.send(way.step(sync))
    os._exit(0)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--sequences", default=8, show_default=True, help="Of 512 tokens, a batch.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--budget", default=20.0, show_default=True, help="Seconds for all rounds.")
@click.option("--commit", default="", help="What is measured, where git does not know.")
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(sequences: int, rounds: int, budget: float, commit: str, out: Path | None) -> None:
    """Measure steps of BERT-large by how its gradients are averaged."""
    if not torch.cuda.is_available():
        click.echo("allreduce_step.py: needs a GPU, and there is none", err=True)
        sys.exit(1)
    gpu = torch.device("cuda", 0)
    result: dict[str, Any] = {
        "operator": "allreduce",
        "machine": machine.describe(gpu),
        "versions": machine.versions(gpu),
        "commit": commit or machine.commit(),
        "date": machine.now(),
        "command": f"python benchmarks/allreduce_step.py --sequences {sequences} "
        f"--rounds {rounds} --budget {budget:g}",
        "complete": True,
        "cases": [],
    }
    found: dict[tuple[bool, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as work:
        context: Any = multiprocessing.get_context("spawn")
        pipes: dict[str, Any] = {}
        for at, name in enumerate(WAYS):
            pipes[name], theirs = context.Pipe()
            own = Path(work, str(at))
            own.mkdir()
            arguments = theirs, name, str(own), sequences
            context.Process(target=serve, args=arguments, daemon=True).start()
        for name, pipe in pipes.items():
            if not pipe.poll(60):
                raise click.ClickException(f"{name} did not come within 60 s: see its own error")
            pipe.recv()
        begin = time.monotonic()
        for turn in range(rounds):
            if turn and time.monotonic() - begin > budget:
                break
            for name in WAYS[turn % len(WAYS) :] + WAYS[: turn % len(WAYS)]:
                for sync in (False, True):
                    pipes[name].send(sync)
                    found.setdefault((sync, name), []).append(pipes[name].recv())
        for pipe in pipes.values():
            pipe.send(None)
    for sync in (False, True):
        rows = []
        for name in WAYS:
            turns = found[sync, name]
            columns = {key: [turn[key] for turn in turns] for key in turns[0]}
            rows.append({"name": name, **columns})
            middle = {key: statistics.median(values) for key, values in columns.items()}
            shown = " ".join(f"{key} {value:.1f}" for key, value in middle.items())
            click.echo(f"averaging {sync}, {name}: {shown}; ms {columns['ms']}")
        result["cases"].append({"model": MODEL, "averaging": sync, "rows": rows})
    result["complete"] = all(
        len(row["ms"]) == rounds for case in result["cases"] for row in case["rows"]
    )
    if str(out) != "-":
        directory = machine.ROOT / "benchmarks" / "results" / result["machine"]["slug"]
        path = out or directory / "allreduce_step.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
