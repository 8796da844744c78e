"""Whole calls of attention's layers: torch's, ours, and ours by the ways that dispatch leaves out.

    python benchmarks/layers.py                 # writes benchmarks/results/<machine>/layers.json
    python benchmarks/layers.py --only evaluation --out -

Times are of whole eager calls in bf16 as a user waits for them, blocks of calls between
synchronizations; a round measures every way once. "hfai, everywhere" runs here what the shipped
dispatch leaves to torch: where it is the fastest, a limit in `src/hfai/kernels/mha/dispatch.py` or
`src/hfai/nn/transformer.py` is too careful, and where "hfai" is slower than torch one is too bold.
"""

from __future__ import annotations

import contextlib
import copy
import math
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # for hfai, if not installed

from benchmarks.harness import machine, result, ways
from hfai.kernels.extension import compile_all
from hfai.kernels.mha import dispatch
from hfai.kernels.residual_norm import call as residual_call
from hfai.nn import MultiheadAttention, to_hfai, transformer

BF16 = torch.bfloat16
Call = Callable[[], object]
Ways = dict[str, "Call | Everywhere"]
SHAPES = (
    (2, 16, 256),
    (8, 64, 512),
    (32, 128, 768),
    (32, 512, 1024),
    (5000, 64, 512),
    (200, 256, 1024),
)
"""Sequences, rows and features, heads of 64: from what the host bounds to what the GPU does."""
BLOCK_MS = 20.0
SUMS = ((512, 768), (4096, 1024), (16384, 1024))


class Everywhere:
    """A call for which ours runs whatever it covers, whether or not torch was found to be faster.

    The limits are lifted around a block of calls, not in each.
    """

    limits: tuple[tuple[ModuleType, str, int], ...] = (
        (dispatch, "LEAST_WORK_IN_INFERENCE", 0),
        (dispatch, "LEAST_WORK_WITHOUT_WEIGHTS", 0),
        (dispatch, "INSTEAD_OF_ONE_OPERATOR", True),
        (transformer, "LEAST_WORK_IN_EVALUATION", 0),
        (residual_call, "LEAST_ELEMENTS", 0),
    )

    def __init__(self, call: Call) -> None:
        self.call = call
        self._before: list[Any] = []

    def __enter__(self) -> None:
        self._before = [getattr(owner, name) for owner, name, _ in self.limits]
        for owner, name, lifted in self.limits:
            setattr(owner, name, lifted)

    def __exit__(self, *error: object) -> None:
        for (owner, name, _), before in zip(self.limits, self._before, strict=True):
            setattr(owner, name, before)


class Apart(Everywhere):
    """A call in which residual sums and norms are kernels of their own."""

    limits = ((residual_call, "LEAST_ELEMENTS", 1 << 62),)


def block(way: Call | Everywhere, device: torch.device) -> Callable[[int], float]:
    """Return a measure: milliseconds of one call, over a block of about `BLOCK_MS`."""
    context = way if isinstance(way, Everywhere) else contextlib.nullcontext()
    call = way.call if isinstance(way, Everywhere) else way

    def timed(count: int) -> float:
        with context:
            _synchronize(device)
            start = time.perf_counter()
            for _ in range(count):
                call()
            _synchronize(device)
            return 1e3 * (time.perf_counter() - start) / count

    timed(3)
    count = max(2, min(200, math.ceil(BLOCK_MS / timed(3))))
    return lambda turn: timed(count)


def without_gradients(call: Call) -> Call:
    """Return `call` made under `no_grad`."""
    return torch.no_grad()(call)


def evaluation(device: torch.device) -> Iterator[tuple[str, Ways]]:
    """Yield calls without gradients of the attention module and of an encoder layer."""
    for batch, length, features in SHAPES:
        x = torch.randn(batch, length, features, device=device, dtype=BF16)
        heads = features // 64
        options: dict[str, Any] = {"batch_first": True, "device": device, "dtype": BF16}
        torchs = nn.MultiheadAttention(features, heads, **options).eval()
        ours = to_hfai(copy.deepcopy(torchs))
        for need_weights in (True, False):

            def attend(module: nn.Module, x: Tensor = x, wanted: bool = need_weights) -> Call:
                return without_gradients(lambda: module(x, x, x, need_weights=wanted))

            what = "weights" if need_weights else "no weights"
            yield (
                f"attention in evaluation, {batch}x{length}x{features}, {what}",
                {
                    "torch": attend(torchs),
                    "hfai": attend(ours),
                    "hfai, everywhere": Everywhere(attend(ours)),
                },
            )
        layer = nn.TransformerEncoderLayer(features, heads, 4 * features, **options).eval()
        swapped = to_hfai(copy.deepcopy(layer))

        def encode(module: nn.Module, x: Tensor = x) -> Call:
            return without_gradients(lambda: module(x))

        yield (
            f"encoder layer in evaluation, {batch}x{length}x{features}",
            {
                "torch": encode(layer),
                "hfai": encode(swapped),
                "hfai, everywhere": Everywhere(encode(swapped)),
            },
        )


def training(device: torch.device) -> Iterator[tuple[str, Ways]]:
    """Yield forward and backward of encoder and decoder layers under autocast, with dropout."""
    for batch, length, features in SHAPES:
        x = torch.randn(batch, length, features, device=device, requires_grad=True)
        dy = torch.randn_like(x)
        for name in ("encoder", "decoder"):
            kind = nn.TransformerEncoderLayer if name == "encoder" else nn.TransformerDecoderLayer
            torchs = kind(features, features // 64, 4 * features, batch_first=True, device=device)
            ours = to_hfai(copy.deepcopy(torchs))

            def step(
                module: nn.Module, x: Tensor = x, dy: Tensor = dy, decodes: bool = name != "encoder"
            ) -> Call:
                def run() -> None:
                    with torch.autocast(x.device.type, BF16):
                        y = module(x, x) if decodes else module(x)
                    y.backward(dy)

                return run

            yield (
                f"{name} layer in training, {batch}x{length}x{features}",
                {
                    "torch": step(torchs),
                    "hfai": step(ours),
                    "hfai, sums and norms apart": Apart(step(ours)),
                    "hfai, everywhere": Everywhere(step(ours)),
                },
            )


def packed(device: torch.device) -> Iterator[tuple[str, Ways]]:
    """Yield an encoder's step over padded sequences, and without their padding."""
    batch, length, features = 64, 256, 768
    lengths = torch.linspace(length // 8, length, batch, device=device).long()
    padding = torch.arange(length, device=device) >= lengths[:, None]
    layer = nn.TransformerEncoderLayer(
        features, features // 64, 4 * features, dropout=0.0, batch_first=True, device=device
    )
    torchs = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    ours = to_hfai(copy.deepcopy(torchs))
    leaves_out = to_hfai(copy.deepcopy(torchs))
    setattr(leaves_out, "packed", True)  # noqa: B010 (torch's class, as far as types go)
    x = torch.randn(batch, length, features, device=device, requires_grad=True)

    def step(module: nn.Module) -> Call:
        def run() -> None:
            with torch.autocast(x.device.type, BF16):
                y = module(x, src_key_padding_mask=padding)
            y.float().masked_fill(padding[..., None], 0.0).sum().backward()

        return run

    yield (
        f"4 encoder layers, {batch}x{length}x{features}, an eighth to all of each sequence",
        {"torch": step(torchs), "hfai": step(ours), "hfai, packed": step(leaves_out)},
    )


def sums(device: torch.device) -> Iterator[tuple[str, Ways]]:
    """Yield LayerNorm(residual + dropout(branch)) under autocast, forward and backward."""
    for rows, features in SUMS:
        branch = torch.randn(rows, features, device=device, dtype=BF16, requires_grad=True)
        residual = torch.randn(rows, features, device=device, requires_grad=True)
        norm = nn.LayerNorm(features, device=device)
        ours = to_hfai(copy.deepcopy(norm))
        dy = torch.randn(rows, features, device=device)

        def by_parts(
            norm: nn.Module, branch: Tensor = branch, residual: Tensor = residual, dy: Tensor = dy
        ) -> Call:
            def run() -> None:
                with torch.autocast(dy.device.type, BF16):
                    y = norm(residual + nn.functional.dropout(branch, 0.1))
                y.backward(dy)

            return run

        def at_once(
            norm: nn.LayerNorm = norm,
            branch: Tensor = branch,
            residual: Tensor = residual,
            dy: Tensor = dy,
        ) -> None:
            with torch.autocast(dy.device.type, BF16):
                made = residual_call.normalise_sum(
                    branch, None, residual, norm.weight, norm.bias, norm.eps, 0.1
                )
            assert made is not None
            assert made.y is not None
            torch.autograd.backward(made.y, dy)

        yield (
            f"residual sum with dropout and LayerNorm, {rows}x{features}",
            {
                "torch": by_parts(norm),
                "hfai's LayerNorm": by_parts(ours),
                "hfai, everywhere": Everywhere(at_once),
            },
        )


PARTS = {"sums": sums, "training": training, "evaluation": evaluation, "packed": packed}
assert MultiheadAttention is not nn.MultiheadAttention


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@click.command()
@click.option("--only", multiple=True, type=click.Choice(list(PARTS)), help="These parts.")
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--time-budget", type=float, metavar="SECONDS", help="Begin no case after this long.")
@click.option("--commit", help="Recorded as the commit where this is no git checkout.")
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(
    only: tuple[str, ...],
    rounds: int,
    time_budget: float | None,
    commit: str | None,
    out: Path | None,
) -> None:
    """Measure whole calls of attention's layers; needs a GPU."""
    begin = time.monotonic()
    if not torch.cuda.is_available():
        raise click.ClickException("these layers are torch's own without a GPU: nothing to compare")
    device = torch.device("cuda", torch.cuda.current_device())
    compile_all()  # C++ parts, which a user's first seconds go without
    made = ways.document("layers.py", "Attention's layers", sys.argv[1:], (), {})
    made |= {"machine": machine.describe(device), "versions": machine.versions(device)}
    made["commit"] = commit or made["commit"]
    if out is None:
        out = machine.ROOT / "benchmarks" / "results" / made["machine"]["slug"] / "layers.json"
    done = True
    for part in only or PARTS:
        for name, calls in PARTS[part](device):
            if time_budget and time.monotonic() - begin > time_budget:
                done = False
                continue
            measures = {way: block(call, device) for way, call in calls.items()}
            made["cases"].append(
                ways.in_turn(name, "ms", measures, rounds, "torch", lower_is_better=True)
            )
            if str(out) != "-":
                result.write(out, made)
    if not done:
        click.echo("--time-budget is used up: some cases were not measured")
    made["complete"] = done
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
