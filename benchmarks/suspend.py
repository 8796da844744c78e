"""What it costs to ask at every step whether to suspend, and how soon ranks stop.

    python benchmarks/suspend.py                        # writes benchmarks/results/suspend.json
    python benchmarks/suspend.py --rounds 2 --out -     # a quick look

Two ranks of one machine, torch's TCP store between them. Costs are of rank 0, a call, of calls back
to back; the ways that scripts use otherwise, a collective of one flag, run in the same processes in
turn. A look into the store is what `receive_suspend_command` adds four times a second. Times to
stop are from the signal to the answer True on rank 0, in a loop of steps of 10 ms that end with an
all-reduce.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

import hfreduce
from benchmarks.harness import machine, result, ways
from hfai.client import receive_suspend_command
from hfai.client.agreement import Agreement
from hfai.multiprocessing import spawn

RANKS = 2
STEP = 0.01  # seconds


def measure(rank: int, port: int, rounds: int, out: str) -> None:
    """Run all cases in one rank; rank 0 writes them."""
    torch.set_num_threads(1)
    store: Any = dist.TCPStore("127.0.0.1", port, RANKS, rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    reducer = hfreduce.Reducer(store, rank, RANKS)
    flag = torch.zeros(1, dtype=torch.int32)
    say = print if rank == 0 else (lambda line: None)
    receive_suspend_command()

    def asking(call: Callable[[], object], calls: int) -> ways.Measure:
        def run(turn: int) -> float:
            dist.barrier()
            start = time.perf_counter()
            for _ in range(calls):
                call()
            return 1e6 * (time.perf_counter() - start) / calls

        return run

    def stopping(who_hears: Callable[[int], bool]) -> ways.Measure:
        def run(turn: int) -> float:
            # At another moment between two looks into the store each time.
            asked_after = 20 + 7 * turn % 25
            return 1e3 * seconds_to_stop(store, rank, who_hears(rank), asked_after, flag)

        return run

    cases = [
        ways.in_turn(
            "asking, a call",
            "µs",
            {
                "gloo all_reduce of a flag": asking(lambda: dist.all_reduce(flag), 300),
                "hfreduce all_reduce of a flag": asking(lambda: reducer.all_reduce(flag), 300),
                "a look into the store": asking(lambda: store.check(["nothing"]), 300),
                "receive_suspend_command": asking(receive_suspend_command, 30_000),
            },
            rounds,
            "gloo all_reduce of a flag",
            lower_is_better=True,
            say=say,
        ),
        ways.in_turn(
            "from the signal to the stop, steps of 10 ms",
            "ms",
            {
                "rank 0 hears it": stopping(lambda who: who == 0),
                "rank 1 hears it": stopping(lambda who: who == 1),
                "both hear it": stopping(lambda who: True),
            },
            rounds,
            None,
            lower_is_better=True,
            say=say,
        ),
    ]
    if rank == 0:
        Path(out).write_text(json.dumps(cases))
    dist.barrier()
    reducer.close()
    dist.destroy_process_group()


def seconds_to_stop(
    store: Any, rank: int, hears: bool, asked_after: int, flag: torch.Tensor
) -> float:
    """Train until told to stop; return how long that was after the signal."""
    agreement = Agreement(store, rank, RANKS)
    dist.barrier()
    step, asked = 0, 0.0
    while True:
        time.sleep(STEP)
        dist.all_reduce(flag)
        step += 1
        if step == asked_after:
            asked = time.perf_counter()
        heard = "a signal" if hears and step >= asked_after else None
        if agreement.at_boundary(heard, timeout=60.0):
            return time.perf_counter() - asked


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=9, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "suspend.json",
    help="The result file, or - for none.",
)
def main(rounds: int, out: Path) -> None:
    """Measure asking and stopping."""
    made = ways.document(
        "suspend.py", "Asking whether to suspend", ["--rounds", str(rounds)], (), {}
    )
    with tempfile.TemporaryDirectory() as work:
        path = os.path.join(work, "cases")
        spawn(measure, (free_port(), rounds, path), nprocs=RANKS, bind_numa=False)
        made["cases"] = json.loads(Path(path).read_text())
    made["complete"] = True
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    main()
