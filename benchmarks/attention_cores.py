"""The attention kernels alone against the fused ones behind scaled_dot_product_attention.

    python benchmarks/attention_cores.py            (on a GPU; under a minute)

q, k and v are views of one packed projection, as a module's input product leaves them. Every way is
checked against float64 on a few sequences first and timed in turns: rounds of ten calls between
events, behind enough queued work that the host is never waited for. Times are milliseconds.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from benchmarks.harness import machine, result  # noqa: E402
from benchmarks.harness.timing import device_event, elapsed_ms  # noqa: E402
from hfai.kernels import jit  # noqa: E402
from hfai.kernels.attention import Masking, launch, supports  # noqa: E402

BF16, FP32 = torch.bfloat16, torch.float32
# batch, length, heads, head dimension, dtype
CASES = [
    (5000, 64, 8, 64, BF16), (200, 256, 16, 64, BF16), (5000, 64, 8, 64, FP32),
    (200, 256, 16, 64, FP32), (4000, 16, 8, 32, BF16), (2000, 32, 8, 64, BF16),
    (1000, 64, 8, 128, BF16), (1000, 100, 8, 80, BF16), (1000, 128, 8, 64, BF16),
    (500, 197, 12, 64, BF16), (200, 256, 8, 128, BF16),
]  # fmt: skip
TOLERANCE = {BF16: 1e-2, FP32: 1e-3}
CHECKED = 4  # sequences
CALLS = 10  # a round
QUEUED_CYCLES = 1_500_000
NO_MASKS = Masking()
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}


@dataclass
class Way:
    """One implementation: its output and gradients [batch, length, heads, head_dim] by views."""

    forward: Callable[[], Tensor]
    backward: Callable[[], tuple[Tensor, ...]]
    weights: Callable[[], Tensor] | None = None


def ours(q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Way:
    """Return our kernels, the gradients going into one packed tensor."""
    out, lse = launch.attention_forward(q, k, v, NO_MASKS)
    batch, length, heads, head = q.shape
    packed = q.new_empty((batch, length, 3, heads, head))
    targets = (packed[:, :, 0], packed[:, :, 1], packed[:, :, 2])
    return Way(
        lambda: launch.attention_forward(q, k, v, NO_MASKS, out)[0],
        lambda: launch.attention_backward(dout, q, k, v, out, lse, NO_MASKS, targets),
        lambda: launch.attention_weights(q, k, lse, NO_MASKS, True),
    )


def torchs(backend: SDPBackend, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> Way:
    """Return torch's operator held to one backend; raises RuntimeError where that takes it not."""
    queries, keys, values = (t.detach().transpose(1, 2).requires_grad_() for t in (q, k, v))
    with sdpa_kernel(backend):
        out = F.scaled_dot_product_attention(queries, keys, values)

    def forward() -> Tensor:
        with torch.no_grad(), sdpa_kernel(backend):
            return F.scaled_dot_product_attention(queries, keys, values).transpose(1, 2)

    def backward() -> tuple[Tensor, ...]:
        inputs = (queries, keys, values)
        found = torch.autograd.grad(out, inputs, dout.transpose(1, 2), retain_graph=True)
        return tuple(gradient.transpose(1, 2) for gradient in found)

    return Way(forward, backward)


def worst_error(way: Way, q: Tensor, k: Tensor, v: Tensor, dout: Tensor) -> float:
    """Return the largest ‖x - exact‖ / ‖exact‖ of output and gradients, on a few sequences."""
    few = [t[:CHECKED].double().transpose(1, 2) for t in (q, k, v, dout)]
    inputs = [t.detach().requires_grad_() for t in few[:3]]
    exact = F.scaled_dot_product_attention(inputs[0], inputs[1], inputs[2])
    exacts = (exact, *torch.autograd.grad(exact, inputs, few[3]))
    errors = [
        float((made[:CHECKED].transpose(1, 2).double() - true).norm() / true.norm())
        for made, true in zip((way.forward(), *way.backward()), exacts, strict=True)
    ]
    return max(errors) if all(map(math.isfinite, errors)) else math.inf


def timed(call: Callable[[], Any]) -> float:
    """Return milliseconds a call takes on the GPU."""
    start, end = device_event(), device_event()
    torch.cuda._sleep(QUEUED_CYCLES)  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(CALLS):
        call()
    end.record()
    end.synchronize()
    return elapsed_ms(start, end) / CALLS


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Time calls in turns; return median, least and most of each."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        timed(call)
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(timed(call))
    return {
        name: {"median": statistics.median(ms), "least": min(ms), "most": max(ms)}
        for name, ms in times.items()
    }


def measure(
    batch: int, length: int, heads: int, head: int, dtype: torch.dtype, rounds: int
) -> dict[str, Any]:
    """Check and time one case."""
    packed = torch.randn(batch, length, 3, heads, head, device="cuda", dtype=dtype)
    q, k, v = packed.unbind(2)
    dout = torch.randn(batch, length, heads, head, device="cuda", dtype=dtype)
    ways, absent = {}, {}
    reason = supports(q, k, v, differentiable=True)
    if reason is None:
        ways["hfai"] = ours(q, k, v, dout)
    else:
        absent["hfai"] = reason
    for name, backend in BACKENDS.items():
        try:
            ways[name] = torchs(backend, q, k, v, dout)
        except RuntimeError as error:
            absent[name] = result.first_line(error)
    errors = {name: worst_error(way, q, k, v, dout) for name, way in ways.items()}
    wrong = [name for name, error in errors.items() if not error < TOLERANCE[dtype]]
    kept = {name: way for name, way in ways.items() if name not in wrong}
    tensor_bytes = q.numel() * q.element_size()
    return {
        "shape": {"batch": batch, "length": length, "heads": heads, "head_dim": head},
        "dtype": str(dtype).removeprefix("torch."),
        "bytes": {"forward": 4 * tensor_bytes, "backward": 7 * tensor_bytes},
        "flops": {"forward": 4 * q.numel() * length, "backward": 10 * q.numel() * length},
        "errors": {name: error for name, error in errors.items() if math.isfinite(error)},
        "wrong": wrong,
        "absent": absent,
        "forward": in_turns({n: w.forward for n, w in kept.items()}, rounds),
        "backward": in_turns({n: w.backward for n, w in kept.items()}, rounds),
        "weights": in_turns({n: w.weights for n, w in kept.items() if w.weights}, rounds),
    }


@click.command()
@click.option("--rounds", default=7, show_default=True, help="Rounds in turns.")
@click.option("--out", default=str(ROOT / "benchmarks/results"), help="Where results are kept.")
@click.option("--commit", default=None, help="The commit, where there is no git.")
def main(rounds: int, out: str, commit: str | None) -> None:
    """Measure every case and write <out>/<machine>/attention_cores.json."""
    if not torch.cuda.is_available():
        raise click.ClickException("attention's kernels need a CUDA device, and torch finds none")
    reason = jit.why_unavailable(0)
    if reason is not None:
        raise click.ClickException(reason)
    torch.backends.cuda.matmul.allow_tf32 = True
    device = torch.device("cuda", 0)
    about = machine.describe(device)
    cases = []
    for case in CASES:
        cases.append(measure(*case, rounds))
        for which in ("forward", "backward", "weights"):
            row = "  ".join(f"{n} {t['median']:.4f}" for n, t in cases[-1][which].items())
            click.echo(f"{'x'.join(map(str, case[:4]))} {cases[-1]['dtype']} {which}: {row}")
        torch.cuda.empty_cache()
    document = {
        "command": f"python benchmarks/attention_cores.py --rounds {rounds}",
        "date": machine.now(),
        "commit": commit or machine.commit(),
        "machine": about,
        "versions": machine.versions(device),
        "tf32": True,
        "complete": True,
        "cases": cases,
    }
    path = Path(out) / about["slug"] / "attention_cores.json"
    result.write(path, document)
    click.echo(str(path))
    if any(case["wrong"] for case in cases):
        raise click.ClickException("some results are wrong: see `wrong` in the file")


if __name__ == "__main__":
    main()
