"""Ways to lay one attention call out on the GPU, in turns: what the defaults in hopper.py rest on.

    python benchmarks/attention_plans.py            (on a Hopper GPU; under a minute)

Each plan's result is checked against float64 on a few sequences first. "mma" is what other devices
run, "cudnn" torch's operator. Times are milliseconds, as benchmarks/attention_cores.py takes them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.attention_cores import (  # noqa: E402
    BACKENDS,
    BF16,
    NO_MASKS,
    Way,
    in_turns,
    torchs,
    worst_error,
)
from benchmarks.harness import machine, result  # noqa: E402
from hfai.kernels import jit  # noqa: E402
from hfai.kernels.attention import hopper, launch, plan, programs  # noqa: E402
from hfai.kernels.attention.hopper import HopperForwardPlan  # noqa: E402

# batch, length, heads, head dimension
SHAPES = [(200, 256, 16, 64), (500, 197, 12, 64), (1000, 128, 8, 64)]
TOLERANCE = 1e-2


def forward_plans(head: int, length: int, limits: jit.DeviceLimits) -> dict[str, Any]:
    """Return forward's plans by name."""
    default = hopper.choose_forward(head, BF16, length, length, limits)
    plans: dict[str, Any] = {"default": default}
    for groups in (1, 2, 4):
        for most in (32, 64, 128):
            chunks = -(-length // most)
            chunk = -(-length // (chunks * 16)) * 16
            blocks = min(4 // groups, 227 * 1024 // (default.shared_bytes + 1024))
            made = HopperForwardPlan(head, groups, default.row_tiles, chunk, chunks, blocks)
            if groups <= default.row_tiles and made not in plans.values():
                plans[f"{groups} groups, {chunk} keys"] = made
    other = replace(limits, architecture="sm_90 without wgmma")
    plans["mma"] = plan.choose_forward(head, BF16, length, length, other)
    return plans


def backward_plans(head: int, length: int, limits: jit.DeviceLimits) -> dict[str, Any]:
    """Return backward's plans by name."""
    default = hopper.choose_backward(head, BF16, length, length, limits)
    other = replace(limits, architecture="sm_90 without wgmma")
    return {
        "default": default,
        "passes of 64": replace(default, pass_rows=64),
        "passes of 16": replace(default, pass_rows=16),
        "mma": plan.choose_backward(head, BF16, length, length, other),
    }


def ways(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, which: str) -> Iterator[tuple[str, Way]]:
    """Yield every plan of a pass ("forward" or "backward"), the other pass by the default."""
    batch, length, heads, head = q.shape
    limits, device = jit.device_limits(0), q.get_device()
    key = programs._key(q, k, NO_MASKS)
    constants = {"SPLIT": False, **programs.mask_constants(False, 0, 0, False)}  # type: ignore[arg-type]
    packed = q.new_empty((batch, length, 3, heads, head))
    targets = (packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])
    out, lse = launch.attention_forward(q, k, v, NO_MASKS)

    def way(forward: Any, backward: Any) -> Way:
        def run_forward() -> Tensor:
            programs._forward[key] = forward
            return launch.attention_forward(q, k, v, NO_MASKS, out)[0]

        def run_backward() -> tuple[Tensor, ...]:
            programs._backward[key] = backward
            return launch.attention_backward(dout, q, k, v, out, lse, NO_MASKS, targets)

        return Way(run_forward, run_backward)

    forward, backward = programs.forward(q, k, NO_MASKS), programs.backward(q, k, NO_MASKS)
    if which == "forward":
        for name, chosen in forward_plans(head, length, limits).items():
            ragged = chosen.chunk * chosen.chunks != length
            used = constants | {"RAGGED": ragged}
            yield name, way(programs.load_forward(chosen, BF16, device, used), backward)
    else:
        for name, chosen in backward_plans(head, length, limits).items():
            ragged = chosen.key_block * chosen.key_blocks != length
            used = constants | {"RAGGED": ragged}
            yield name, way(forward, programs.load_backward(chosen, BF16, device, used))
    programs._forward[key], programs._backward[key] = forward, backward


def measure(shape: tuple[int, int, int, int], rounds: int) -> dict[str, Any]:
    """Check and time every plan of one shape."""
    batch, length, heads, head = shape
    packed = torch.randn(batch, length, 3, heads, head, device="cuda", dtype=BF16)
    q, k, v = packed.unbind(2)
    dout = torch.randn(batch, length, heads, head, device="cuda", dtype=BF16)
    found: dict[str, Any] = {"shape": list(shape)}
    for which in ("forward", "backward"):
        named = dict(ways(q, k, v, dout, which))
        named["cudnn"] = torchs(BACKENDS["cudnn"], q, k, v, dout)
        errors = {name: worst_error(way, q, k, v, dout) for name, way in named.items()}
        calls: dict[str, Callable[[], Any]] = {
            name: getattr(way, which) for name, way in named.items() if errors[name] < TOLERANCE
        }
        found[which] = in_turns(calls, rounds)
        found[f"{which}_errors"] = errors
    return found


@click.command()
@click.option("--rounds", default=7, show_default=True, help="Rounds in turns.")
@click.option("--out", default=str(ROOT / "benchmarks/results"), help="Where results are kept.")
@click.option("--commit", default=None, help="The commit, where there is no git.")
def main(rounds: int, out: str, commit: str | None) -> None:
    """Measure every plan and write <out>/<machine>/attention_plans.json."""
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        raise click.ClickException("the plans are Hopper's, and torch finds no such GPU")
    device = torch.device("cuda", 0)
    about = machine.describe(device)
    cases = []
    for shape in SHAPES:
        cases.append(measure(shape, rounds))
        for which in ("forward", "backward"):
            for name, error in cases[-1][f"{which}_errors"].items():
                ms = cases[-1][which].get(name)
                taken = (
                    f"{ms['median']:.4f} ({ms['least']:.4f}-{ms['most']:.4f})" if ms else "wrong"
                )
                click.echo(f"{'x'.join(map(str, shape))} {which} {name}: {taken} error {error:.2e}")
        torch.cuda.empty_cache()
    document = {
        "command": f"python benchmarks/attention_plans.py --rounds {rounds}",
        "date": machine.now(),
        "commit": commit or machine.commit(),
        "machine": about,
        "versions": machine.versions(device),
        "complete": True,
        "cases": cases,
    }
    path = Path(out) / about["slug"] / "attention_plans.json"
    result.write(path, document)
    click.echo(str(path))


if __name__ == "__main__":
    main()
