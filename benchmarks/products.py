"""Large fp32 products in bf16 parts (hfai.kernels.products) against torch's own fp32 product.

    python benchmarks/products.py            (on a Hopper GPU; under a minute)
    python benchmarks/products.py --grid     many sizes, those left to torch too

Both are captured in CUDA graphs, so that the host is never waited for, and replayed in turns.
Errors are those of some rows against float64, ‖x - exact‖ / ‖exact‖. Times are milliseconds.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.attention_cores import in_turns  # noqa: E402
from benchmarks.harness import machine, result  # noqa: E402
from hfai.kernels import products  # noqa: E402
from hfai.kernels.products import plan  # noqa: E402

CHECKED_ROWS = 256
MOST_OPERATIONS = 1e12  # of a size of the grid


class Size(NamedTuple):
    """out [m, n] = a [m, k] b [k, n]; operands that lie as their transpose are by columns."""

    what: str
    m: int
    k: int
    n: int
    a_by_columns: bool = False
    b_by_columns: bool = False


CASES = [
    Size("LSTM 985, 4000 rows: input product", 4000, 985, 3940, b_by_columns=True),
    Size("LSTM 985, 4000 rows: dx", 4000, 3940, 985),
    Size("LSTM 985, 4000 rows: dW", 3940, 4000, 985, a_by_columns=True),
    Size("attention 200x256x1024: q, k, v", 51200, 1024, 3072, b_by_columns=True),
    Size("attention 200x256x1024: output", 51200, 1024, 1024, b_by_columns=True),
    Size("attention 200x256x1024: dx", 51200, 3072, 1024),
    Size("attention 200x256x1024: dW", 3072, 51200, 1024, a_by_columns=True),
    Size("attention 5000x64x512: q, k, v", 320000, 512, 1536, b_by_columns=True),
    Size("attention 5000x64x512: output", 320000, 512, 512, b_by_columns=True),
    Size("attention 5000x64x512: dx", 320000, 1536, 512),
    Size("attention 5000x64x512: dW", 1536, 320000, 512, a_by_columns=True),
    Size("square", 1024, 1024, 1024),
    Size("square", 2048, 2048, 2048),
    Size("square", 8192, 8192, 8192),
]
GRID = [
    Size("grid", m, k, n)
    for m, k, n in itertools.product(
        (256, 1024, 4096, 16384, 65536), (128, 256, 512, 1024, 4096), (64, 256, 512, 1024, 4096)
    )
    if 2 * m * k * n < MOST_OPERATIONS
]


def captured(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the replay of a call's kernels."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def error(found: Tensor, exact: Tensor) -> float:
    """Return ‖found - exact‖ / ‖exact‖."""
    return float((found.double() - exact).norm() / exact.norm())


def measure(size: Size, rounds: int) -> dict[str, Any]:
    """Check and time one size."""
    what, m, k, n, a_by_columns, b_by_columns = size
    a = torch.randn(k, m, device="cuda").t() if a_by_columns else torch.randn(m, k, device="cuda")
    b = torch.randn(n, k, device="cuda").t() if b_by_columns else torch.randn(k, n, device="cuda")
    outs = {name: torch.full((m, n), torch.nan, device="cuda") for name in ("torch", "hfai")}
    calls = {
        "torch": captured(lambda: torch.mm(a, b, out=outs["torch"])),
        "hfai": captured(lambda: products.multiply(a, b, outs["hfai"])),
    }
    for call in calls.values():
        call()
    exact = a[:CHECKED_ROWS].double() @ b.double()
    errors = {name: error(out[:CHECKED_ROWS], exact) for name, out in outs.items()}
    del exact
    multiprocessors = torch.cuda.get_device_properties(0).multi_processor_count
    chosen = plan.choose(m, k, n, multiprocessors)
    times = in_turns(calls, rounds)
    return {
        "what": what,
        "size": {"m": m, "k": k, "n": n},
        "by_columns": {"a": a_by_columns, "b": b_by_columns},
        "flops": 2 * m * k * n,
        "errors": errors,
        "plan": dataclasses.asdict(chosen),
        "left_to_torch": products.why_not(a, b, outs["hfai"]),
        "times": times,
        "speed": times["torch"]["median"] / times["hfai"]["median"],
    }


@click.command()
@click.option("--grid", is_flag=True, help="Many sizes, and products_grid.json.")
@click.option("--rounds", default=7, show_default=True, help="Rounds in turns.")
@click.option("--out", default=str(ROOT / "benchmarks/results"), help="Where results are kept.")
@click.option("--commit", default=None, help="The commit, where there is no git.")
def main(grid: bool, rounds: int, out: str, commit: str | None) -> None:
    """Measure every size and write <out>/<machine>/products.json."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise click.ClickException("the kernels are for a Hopper GPU, and torch finds none")
    torch.backends.cuda.matmul.allow_tf32 = False
    device = torch.device("cuda", 0)
    about = machine.describe(device)
    cases = []
    for size in GRID if grid else CASES:
        cases.append(measure(size, rounds))
        case = cases[-1]
        ours = case["times"]["hfai"]["median"]
        click.echo(
            f"{size.m}x{size.k}x{size.n} torch {case['times']['torch']['median']:.4f} ours "
            f"{ours:.4f} ({case['speed']:.2f}, {case['flops'] / ours / 1e9:.0f} TFLOP/s, error "
            f"{case['errors']['hfai'] / case['errors']['torch']:.2f}) thought {chosen_ms(case):.4f}"
            + (" left to torch" if case["left_to_torch"] else "")
        )
        torch.cuda.empty_cache()
    name = "products_grid" if grid else "products"
    document = {
        "command": f"python benchmarks/products.py{' --grid' * grid} --rounds {rounds}",
        "date": machine.now(),
        "commit": commit or machine.commit(),
        "machine": about,
        "versions": machine.versions(device),
        "tf32": False,
        "complete": True,
        "cases": cases,
    }
    path = Path(out) / about["slug"] / f"{name}.json"
    result.write(path, document)
    click.echo(str(path))


def chosen_ms(case: dict[str, Any]) -> float:
    """Return what the plan thought a product would take, in milliseconds."""
    return float(case["plan"]["time"]) * 1e3


if __name__ == "__main__":
    main()
