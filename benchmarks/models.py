"""A training step of whole models: torch's layers against hfai's, eager and compiled, in turn.

    python benchmarks/models.py                 # writes benchmarks/results/<machine>/models.json
    python benchmarks/models.py --model bert_large --rounds 3 --out -
    python benchmarks/models.py --model bert_large --curve 200   # losses too, three curves

BERT-large: masked language modelling, batch 32 × 512, 15 % of random tokens labelled. ViT-B/16:
from timm where that is installed, batch 128, random images and labels. bf16 autocast, AdamW fused,
dropout as the models have it. The step is forward, backward, optimizer and zeroed gradients.
Compiled means that each transformer layer is compiled (`torch.compile(layer)`: `layer.compile()`
leaves torch's own classes as they are), which takes a fraction of the time of compiling the whole
and leaves the same kernels inside the layers. Each way has its
own copy of one model; a round measures every way once.

The curve trains on Python's own sources as bytes, since random tokens teach nothing: torch with two
seeds, which says how far apart seeds are, and hfai with the first of them.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import click
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package
sys.path.append(str(Path(__file__).resolve().parents[1] / "src"))  # for hfai, if not installed

from benchmarks.harness import machine, result, ways
from hfai.kernels.extension import compile_all
from hfai.models import BertMLM, bert_large_MLM, bert_tiny_MLM
from hfai.nn import to_hfai

VOCABULARY = 30522
LABELLED = 0.15
LEARNING_RATE = 1e-4


@dataclass(frozen=True)
class Workload:
    """A model and one batch for it.

    Attributes:
        name: as `--model` and the result file call it.
        build: makes the model on the CPU.
        draw: makes one batch on a device.
        loss: computes the loss of a batch.
        layers: the layers that the compiled ways compile.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Callable[[torch.device], tuple[Tensor, ...]]
    loss: Callable[[nn.Module, tuple[Tensor, ...]], Tensor]
    layers: Callable[[nn.Module], nn.ModuleList | nn.Sequential]


def bert(name: str, build: Callable[[], nn.Module], batch: int, length: int) -> Workload:
    """Return BERT's step on random tokens."""

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        ids = torch.randint(VOCABULARY, (batch, length), device=device)
        labels = torch.where(torch.rand(batch, length, device=device) < LABELLED, ids, -100)
        return ids, labels

    return Workload(name, build, draw, mlm_loss, lambda model: cast(nn.ModuleList, model.layers))


def mlm_loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """Return the masked language modelling loss."""
    loss: Tensor = model(batch[0], labels=batch[1]).loss
    return loss


def vit() -> Workload | str:
    """Return ViT-B/16's step, or why it cannot be measured."""
    try:
        import timm
    except ImportError as error:
        return str(error)

    def draw(device: torch.device) -> tuple[Tensor, ...]:
        images = torch.randn(128, 3, 224, 224, device=device)
        return images, torch.randint(1000, (128,), device=device)

    def loss(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    build = functools.partial(timm.create_model, "vit_base_patch16_224")
    return Workload("vit_b16", build, draw, loss, lambda model: cast(nn.Sequential, model.blocks))


def workloads(names: Sequence[str], absent: dict[str, str]) -> Iterator[Workload]:
    """Yield the named workloads; those that are not there are noted in `absent`."""
    for name in names:
        if name == "bert_large":
            yield bert(name, functools.partial(bert_large_MLM, VOCABULARY, 512), 32, 512)
        elif name == "bert_tiny":
            yield bert(name, functools.partial(bert_tiny_MLM, VOCABULARY, 64), 4, 64)
        else:
            found = vit()
            if isinstance(found, str):
                absent[name] = found
            else:
                yield found


class Trained:
    """One way of running a workload: its own model and optimizer, on the device."""

    def __init__(self, workload: Workload, model: nn.Module, device: torch.device) -> None:
        self.workload = workload
        self.device = device
        self.model = model.to(device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)

    def step(self, batch: tuple[Tensor, ...]) -> Tensor:
        """Do one step and return its loss, without waiting for it."""
        with torch.autocast(self.device.type, torch.bfloat16):
            loss = self.workload.loss(self.model, batch)
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def milliseconds(self, batch: tuple[Tensor, ...], steps: int) -> float:
        """Return the time of a step, the mean over a block of steps."""
        _synchronize(self.device)
        start = time.perf_counter()
        for _ in range(steps):
            self.step(batch)
        _synchronize(self.device)
        return 1e3 * (time.perf_counter() - start) / steps


def step_ways(workload: Workload, device: torch.device, compiled: bool) -> dict[str, Trained]:
    """Return torch and hfai on copies of one model, eager or compiled."""
    torch.manual_seed(1)
    model = workload.build().train()
    found = {"torch": copy.deepcopy(model), "hfai": to_hfai(model)}
    if compiled:
        torch._dynamo.reset()
        for one in found.values():
            layers = workload.layers(one)
            for at, layer in enumerate(layers):
                layers[at] = torch.compile(layer)  # type: ignore[assignment]
    return {
        f"{way}, {'compiled' if compiled else 'eager'}": Trained(workload, one, device)
        for way, one in found.items()
    }


def measure(
    workload: Workload, device: torch.device, compiled: bool, rounds: int, steps: int
) -> list[dict[str, Any]]:
    """Measure a workload's step in both ways; return the cases of time and of peak memory."""
    trained = step_ways(workload, device, compiled)
    batch = workload.draw(device)
    how = "compiled" if compiled else "eager"
    peaks: dict[str, list[float]] = {}
    for way, one in trained.items():
        counters.clear()
        # Beyond the limit dynamo would run the remaining layers as they are, with no more than a
        # warning: a raise, since such a way is not what its name says.
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for _ in range(3):  # kernels are compiled, the allocator's pools filled
                one.step(batch)
        if compiled and not counters["stats"]["unique_graphs"]:
            raise RuntimeError(f"{workload.name}: nothing of {way} was compiled")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            before = torch.cuda.memory_allocated(device)
            torch.cuda.reset_peak_memory_stats(device)
            one.step(batch)
            torch.cuda.synchronize(device)
            peaks[way] = [(torch.cuda.max_memory_allocated(device) - before) / 2**30]
    measures = {
        way: lambda turn, one=one: one.milliseconds(batch, steps) for way, one in trained.items()
    }
    baseline = f"torch, {how}"
    cases = [
        ways.in_turn(
            f"{workload.name} step, {how}", "ms", measures, rounds, baseline, lower_is_better=True
        )
    ]
    if peaks:
        name = f"{workload.name} peak memory of a step's activations, {how}"
        cases.append(ways.as_case(name, "GiB", peaks, baseline, lower_is_better=True))
    return cases


def curves(workload: Workload, device: torch.device, steps: int) -> dict[str, Any]:
    """Train on Python's sources; return the losses of every step as a case of the result file."""
    figures: dict[str, list[float]] = {}
    for way, seed in (("torch, seed 1", 1), ("torch, seed 2", 2), ("hfai, seed 1", 1)):
        torch.manual_seed(seed)
        model = workload.build().train()
        trained = Trained(workload, to_hfai(model) if way.startswith("hfai") else model, device)
        batches = source_batches(workload.draw(device)[0].shape, device)
        losses = [trained.step(batch) for batch, _ in zip(batches, range(steps), strict=False)]
        figures[way] = torch.stack(losses).tolist()
        del trained, model
        _free(device)
    return ways.as_case(f"{workload.name} loss", "nats", figures, None, by="step")


def source_batches(shape: torch.Size, device: torch.device) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same masked batches of the standard library's bytes each time; 256 is the mask."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    text = b"".join(path.read_bytes() for path in sorted(folder.glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(0)
    while True:
        starts = torch.randint(len(data) - shape[1], (shape[0], 1), generator=generator)
        ids = data[starts + torch.arange(shape[1])]
        chosen = torch.rand(shape, generator=generator) < LABELLED
        labels = torch.where(chosen, ids, -100)
        yield torch.where(chosen, 256, ids).to(device), labels.to(device)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


@click.command()
@click.option(
    "--model",
    "models",
    multiple=True,
    type=click.Choice(["bert_large", "vit_b16", "bert_tiny"]),
    default=("bert_large", "vit_b16"),
    show_default=True,
)
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--steps", type=click.IntRange(1), default=4, show_default=True, help="Of a block.")
@click.option("--compiled/--no-compiled", default=True, show_default=True)
@click.option("--curve", type=click.IntRange(0), default=0, help="Steps of the loss curves.")
@click.option("--time-budget", type=float, metavar="SECONDS", help="Begin no case after this long.")
@click.option("--commit", help="Recorded as the commit.  [default: the checked-out one]")
@click.option("--out", type=click.Path(path_type=Path), help="The result file, or - for none.")
def main(
    models: Sequence[str],
    rounds: int,
    steps: int,
    compiled: bool,
    curve: int,
    time_budget: float | None,
    commit: str | None,
    out: Path | None,
) -> None:
    """Measure training steps of whole models."""
    begin = time.monotonic()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        compile_all()  # C++ parts, which a user's first seconds go without
    absent: dict[str, str] = {}
    made = ways.document("models.py", "Training steps", sys.argv[1:], ("timm",), absent)
    made |= {"machine": machine.describe(device), "versions": machine.versions(device)}
    made["commit"] = commit or made["commit"]
    made["absent"] = absent
    if out is None:
        out = machine.ROOT / "benchmarks" / "results" / made["machine"]["slug"] / "models.json"

    def write() -> None:
        if str(out) != "-":
            assert out is not None
            result.write(out, made)

    done = True
    for workload in workloads(models, absent):
        for as_compiled in (False, True) if compiled else (False,):
            if time_budget and time.monotonic() - begin > time_budget:
                done = False
                click.echo(f"--time-budget is used up before {workload.name}, {as_compiled=}")
                continue
            made["cases"] += measure(workload, device, as_compiled, rounds, steps)
            _free(device)
            write()
        if curve and isinstance(workload.build(), BertMLM):
            made["cases"].append(curves(workload, device, curve))
            write()
    for name, reason in absent.items():
        click.echo(f"{name} is absent: {reason}")
    made["complete"] = done
    write()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
