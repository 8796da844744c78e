"""What an asynchronous save costs a training on a GPU: hfai beside torch DCP's `async_save`.

    python benchmarks/checkpoint_cuda.py                  # writes …/results/checkpoint_cuda.json
    python benchmarks/checkpoint_cuda.py --device cpu --gigabytes 0.1 --rounds 1 --out -

A transformer trains with AdamW (float32 states, bfloat16 products). A round times plain steps, lets
one way save while the steps go on until the checkpoint is there, and times plain steps again; the
ways take turns, and a first save of each is reported apart. DCP makes its buffers in it; hfai's are
prepared before, and what that costs the steps is a figure too. Per save:

- stall: the time of the call, and what the four steps from it on take beyond plain ones. A step
  whose optimizer waits for the copies is among them;
- step time during the write: the median of the later steps that began before the end of the write,
  over that of the plain steps right before and right behind;
- the seconds until the checkpoint is there, and the host's memory that this process holds.

DCP is given what it has for this: staging through pinned shared memory, asynchronous and with
non-blocking copies, that is kept from save to save (torch 2.11 closes it, and the cache inside it,
behind each save, and then cannot use it again; here both are left out), and a process of its own
that writes (or a thread, as a second way), as many threads as hfai, no CRC-32. It gets a flat dict
of the tensors themselves, without names of options, and loads into it in place. Its optimizer step
waits for the staging, as its documentation asks. Only hfai hashes. Both flush their files. What is
loaded is compared with sums of the bits that were saved.
"""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor, nn
from torch import distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import machine, result, ways
from hfai import checkpoint
from hfai.checkpoint.staging import HostPool

HFAI, PROCESS, THREAD = "hfai", "torch DCP, a process", "torch DCP, a thread"
BASELINE = PROCESS
STALL_STEPS = 4
PLAIN_STEPS = 4  # before each save, and behind it


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.heads = width // 128
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return what the next layer takes."""
        batch, length, width = x.shape
        parts = self.inputs(self.first(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        found: Tensor = x + self.down(nn.functional.gelu(self.up(self.second(x))))
        return found


class Training:
    """A model and its optimizer, `size` bytes of parameters and states together."""

    def __init__(self, size: int, device: torch.device) -> None:
        width = 4096 if size > 4e9 else 512
        layers = max(1, round(size / (12 * 12 * width * width)))
        torch.manual_seed(0)
        with torch.device(device):
            self.model = nn.Sequential(*(Block(width) for _ in range(layers)))
            self.batch = torch.randn(*((8, 1024) if width == 4096 else (4, 64)), width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5, fused=True)
        self.device = device

    def step(self, before: Callable[[], object] = lambda: None) -> float:
        """Do a step and return its seconds; `before` is called before the optimizer's."""
        start = time.perf_counter()
        with torch.autocast(self.device.type, torch.bfloat16):
            self.model(self.batch).square().mean().backward()
        before()
        self.optimizer.step()
        self.optimizer.zero_grad()
        synchronize()
        return time.perf_counter() - start

    def plain(self) -> list[float]:
        """Return the seconds of a few steps."""
        return [self.step() for _ in range(PLAIN_STEPS)]

    def state(self) -> dict[str, Tensor]:
        """Return all that is saved."""
        found = {}
        for name, parameter in self.model.named_parameters():
            found[f"model.{name}"] = parameter.detach()
            for key, value in self.optimizer.state[parameter].items():
                found[f"optimizer.{name}.{key}"] = value
        return found

    def part(self, what: str) -> dict[str, Tensor]:
        """Return what is loaded: all of it, or the model's."""
        state = self.state()
        return {name: t for name, t in state.items() if what == "all" or name.startswith("model.")}

    def bytes(self) -> int:
        """Return how many are saved."""
        return total(self.state())


def total(tensors: dict[str, Tensor]) -> int:
    """Return how many bytes tensors have."""
    return sum(tensor.nbytes for tensor in tensors.values())


def sums(tensors: dict[str, Tensor]) -> list[int]:
    """Return a number for the bits of each tensor."""
    return [int(t.detach().reshape(-1).view(torch.int32).sum()) for t in tensors.values()]


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Saving(NamedTuple):
    """A save that runs: what its optimizer step waits for, whether it has ended, its end."""

    before_step: Callable[[], object]
    done: Callable[[], bool]
    wait: Callable[[], object]


class Ways:
    """Each way's `save` and `load`, and what it keeps between saves."""

    def __init__(self, size: int, threads: int) -> None:
        self.threads = threads
        self.budget = size + (1 << 30)
        self.pool = HostPool(self.budget)
        self.stagers: dict[str, Any] = {}

    def save(self, way: str, path: str, training: Training) -> Saving:
        """Begin a save."""
        if way == HFAI:
            handle = checkpoint.save_async(
                path, training.model, training.optimizer, rng=False, pool=self.pool,
                threads=self.threads,
            )  # fmt: skip
            return Saving(lambda: None, handle.done, handle.wait)
        import torch.distributed.checkpoint as dcp_module
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        dcp: Any = dcp_module
        torch.serialization.set_crc32_options(False)
        found = dcp.async_save(
            training.state(),
            storage_writer=dcp.FileSystemWriter(path, thread_count=self.threads, sync_files=True),
            async_checkpointer_type=AsyncCheckpointerType[
                "PROCESS" if way == PROCESS else "THREAD"
            ],
            async_stager=self._stager(way),
        )
        staged = getattr(found, "staging_completion", None)
        end = getattr(found, "upload_completion", found)
        return Saving(staged.result if staged else lambda: None, end.done, end.result)

    def _stager(self, way: str) -> Any:
        if way not in self.stagers:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

            class Kept(DefaultStager):
                def close(self) -> None:
                    """Stay as it is, for the next save."""

            cuda = torch.cuda.is_available()
            stager: Any = Kept(StagingOptions(cuda, way == PROCESS, cuda, cuda))
            stager._state_dict_stager.close = lambda: None
            self.stagers[way] = stager
        return self.stagers[way]

    def load(self, way: str, path: str, training: Training, what: str) -> None:
        """Load into what is there."""
        if way == HFAI:
            optimizer = training.optimizer if what == "all" else None
            checkpoint.load_into(path, training.model, optimizer, threads=self.threads)
            return
        import torch.distributed.checkpoint as dcp_module

        dcp: Any = dcp_module
        dcp.load(training.part(what), checkpoint_id=path)

    def prepare(self, training: Training) -> dict[str, float]:
        """Make hfai's buffers beside the training; return what it costs the steps."""
        plain = training.plain()
        start = time.perf_counter()
        self.pool = checkpoint.prepare(training.model, training.optimizer, host_budget=self.budget)
        call = time.perf_counter() - start
        times, took = [], 0.0
        while not took:
            times.append(training.step())
            took = time.perf_counter() - start if self.pool.wait_prepared(0) else 0.0
        plain += training.plain()
        usual = statistics.median(plain)
        return {
            "call": call,
            "took": took,
            "prepared": self.pool.allocated / 1e9,
            "step": statistics.median(times) / usual,
            "mean": statistics.mean(times) / statistics.mean(plain),
            "longest": max(times) / usual,
            "longest plain": max(plain) / usual,
        }


def rounded(figures: dict[str, float]) -> dict[str, float]:
    """Return figures as they are printed."""
    return {key: float(f"{value:.3g}") for key, value in figures.items()}


def resident() -> float:
    """Return the GB of host memory that this process has, page-locked and shared included."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(
        int(line.split()[1]) * 1024 / 1e9
        for line in lines
        if line.startswith(("RssAnon", "RssShmem"))
    )


def one_save(ways_: Ways, way: str, path: str, training: Training, loads: str) -> dict[str, float]:
    """Save once beside the training, and load that, if wanted; return the figures."""
    plain = training.plain()
    expected = sums(training.part(loads)) if loads else []
    start = time.perf_counter()
    saving = ways_.save(way, path, training)
    call = time.perf_counter() - start
    times: list[float] = []
    during: list[float] = []
    while len(times) < STALL_STEPS or not saving.done():
        running = not saving.done()
        times.append(training.step(saving.before_step if not times else lambda: None))
        if len(times) > STALL_STEPS and running:
            during.append(times[-1])
    saving.wait()
    took = time.perf_counter() - start
    plain += training.plain()
    usual = statistics.median(plain)
    found = {
        "stall": call + sum(times[:STALL_STEPS]) - STALL_STEPS * usual,
        "call": call,
        "step": 1000 * usual,
        "took": took,
        "memory": resident(),
    }
    if loads:
        found["load"] = one_load(ways_, way, path, training, loads, expected)
    if during:
        found["during"] = statistics.median(during) / usual
    return found


def one_load(
    ways_: Ways, way: str, path: str, training: Training, what: str, expected: list[int]
) -> float:
    """Load what was saved and compare it; return GB/s."""
    part = training.part(what)
    for tensor in part.values():
        tensor.detach().zero_()
    synchronize()
    start = time.perf_counter()
    ways_.load(way, path, training, what)
    synchronize()
    took = time.perf_counter() - start
    if sums(part) != expected:
        raise RuntimeError(f"{way} loads other values than it saved")
    return total(part) / 1e9 / took


@click.command()
@click.option("--gigabytes", type=click.FloatRange(0.01), default=24.0, show_default=True)
@click.option("--rounds", type=click.IntRange(1), default=3, show_default=True)
@click.option("--loads", type=int, default=100, help="How many rounds load too; the first is one.")
@click.option("--load", "what", type=click.Choice(["all", "model"]), default="all")
@click.option("--threads", type=click.IntRange(1), default=4, show_default=True)
@click.option("--device", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--directory", help="Where checkpoints go.  [default: in memory (tmpfs)]")
@click.option("--without", multiple=True, type=click.Choice([PROCESS, THREAD]))
@click.option("--time-budget", type=float, default=1e9, help="Seconds; begins no round after it.")
@click.option("--commit", help="What the result file names, where there is no repository.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "checkpoint_cuda.json",
    help="The result file, or - for none.",
)
def main(
    gigabytes: float,
    rounds: int,
    loads: int,
    what: str,
    threads: int,
    device: str,
    directory: str | None,
    without: tuple[str, ...],
    time_budget: float,
    commit: str | None,
    out: Path,
) -> None:
    """Measure saves beside a training, and loads to the GPU."""
    began = time.monotonic()
    names = [way for way in (HFAI, PROCESS, THREAD) if way not in without]
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29577")
    backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, rank=0, world_size=1)
    training = Training(int(gigabytes * 1e9), torch.device(device))
    training.plain()
    size = training.bytes()
    place = "in memory (tmpfs)" if directory is None else directory
    base = directory or ("/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
    absent: dict[str, str] = {}
    firsts: dict[str, dict[str, float]] = {}
    figures: dict[str, dict[str, list[float]]] = {}
    ways_ = Ways(size, threads)
    prepared = ways_.prepare(training)
    click.echo(f"{time.monotonic() - began:.0f} s: prepare: {rounded(prepared)}")

    def write(say: Callable[[str], object]) -> None:
        """Write what there is."""
        made = ways.document(
            "checkpoint_cuda.py",
            "Saves beside a training",
            [
                *("--gigabytes", f"{gigabytes:g}", "--rounds", str(rounds)),
                *("--loads", str(loads), "--load", what, "--threads", str(threads)),
                *(f"--without={way}" for way in without),
            ],
            ("xxhash",),
            absent,
        )
        made["machine"] = machine.describe(torch.device(device))
        if commit:
            made["commit"] = commit
        saved = f"{size / 1e9:.1f} GB of model and optimizer, {place}"

        def add(name: str, unit: str, found: dict[str, list[float]], lower: bool) -> None:
            baseline = BASELINE if BASELINE in found else None
            made["cases"].append(
                ways.as_case(name, unit, found, baseline, lower_is_better=lower, say=say)
            )

        for key, name, unit in (
            ("stall", f"a save's stall, {saved}", "s"),
            ("during", "step time during the write", "of a plain step"),
            ("took", "until the checkpoint is there", "s"),
            ("memory", "host memory of the process, with all ways' buffers", "GB"),
            ("step", "a plain step", "ms"),
        ):
            if figures.get(key):
                add(name, unit, figures[key], True)
        part = "" if what == "all" else ", the model alone"
        add(f"load to the device{part}", "GB/s", figures.get("load", {}), False)
        add("the first save's stall", "s", {w: [f["stall"]] for w, f in firsts.items()}, True)
        for key, name, unit in (
            ("step", "step time while buffers are prepared", "of a plain step"),
            ("mean", "the same, means", "of a plain step"),
            ("took", "until the buffers are prepared", "s"),
        ):
            add(name, unit, {HFAI: [prepared[key]]}, True)
        saves = [len(figures.get("stall", {}).get(way, [])) for way in names]
        made["complete"] = min(saves) == rounds and directory is None
        if str(out) != "-":
            result.write(out, made)

    with tempfile.TemporaryDirectory(dir=base) as work:
        for turn in range(rounds + 1):
            if turn > 1 and time.monotonic() - began > time_budget:
                break
            for way in [names[(turn + at) % len(names)] for at in range(len(names))]:
                if way in absent:
                    continue
                path = f"{work}/{turn}"
                try:
                    found = one_save(ways_, way, path, training, what if turn < loads else "")
                except Exception as error:
                    absent[way] = " ".join(f"{type(error).__name__}: {error}".split())[:300]
                    click.echo(f"{way}: {absent[way]}")
                    continue
                finally:
                    shutil.rmtree(path, ignore_errors=True)
                now = time.monotonic() - began
                click.echo(f"{now:.0f} s: {way}, save {turn}: {rounded(found)}")
                if turn == 0:
                    firsts[way] = found
                    found = {"load": found["load"]} if "load" in found else {}
                for key, value in found.items():
                    figures.setdefault(key, {}).setdefault(way, []).append(value)
            write(lambda line: None)  # what there is, should the machine be taken away
    write(click.echo)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
