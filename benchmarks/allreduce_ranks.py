"""What one rank of benchmarks/allreduce_cuda.py does when it is asked."""

from __future__ import annotations

import contextlib
import os
import statistics
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import parallel

import hfreduce
from haiscale.ddp import DistributedDataParallel
from hfai.models import bert_large_MLM

MIB = 1 << 20
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PRODUCT = 8192
REST = 0.04  # seconds
_VGG16 = [64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0]


class Rank:
    """One rank of one way.

    Args:
        rank: From 0.
        ranks: Their number.
        work: A directory that all see.
        backend: "hfreduce", "nccl" or "gloo".
    """

    def __init__(self, rank: int, ranks: int, work: str, backend: str) -> None:
        torch.set_num_threads(1)
        self.rank, self.ranks, self.work, self.backend = rank, ranks, work, backend
        self.gpu = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(self.gpu)
        self.store: Any = dist.FileStore(f"{work}/store", ranks)  # type: ignore[attr-defined]
        dist.init_process_group("gloo", store=self.store, rank=rank, world_size=ranks)
        self.reducer: hfreduce.Reducer | None = None
        self.group: Any = None
        if backend == "hfreduce":
            self.reducer = hfreduce.Reducer(self.store, rank, ranks, timeout=60)
        elif backend == "nccl":
            self.group = dist.new_group(backend="nccl")
        self.settings: dict[str, Any] = {}
        self._of_chunk: dict[int, hfreduce.Reducer] = {}
        self._model: Any = None
        self._train: Callable[[], None] = lambda: None
        self._hooked: dict[str, tuple[Any, Callable[[], None]]] = {}

    def ready(self) -> None:
        """Make the way work for the first time."""
        self.check("fp32", MIB)

    def reduce(self, tensor: Tensor) -> Any:
        """Start an all-reduce; what is returned can be waited for."""
        if self.reducer is None:
            return dist.all_reduce(tensor, group=self.group, async_op=True)
        return self._path().all_reduce(tensor, "sum")

    def use(self, settings: dict[str, int]) -> None:
        """Lay out hfreduce's memory, and share its work, in another way from now on."""
        if self.reducer is None:
            return
        self.settings, old = settings, self.reducer
        self.reducer = hfreduce.Reducer(self.store, self.rank, self.ranks, timeout=60)
        self._path()
        old.close()

    def stages(self) -> dict[str, float]:
        """Return the share of the time in which each of hfreduce's stages has something to do."""
        path, tensor = self._path(), torch.zeros(186 * MIB // 4, device=self.gpu)
        before = path.busy
        for _ in range(10):
            path.all_reduce(tensor, "sum").wait()
        self._settle()
        time.sleep(0.05)  # the host may be behind
        whole, *parts = (b - a for a, b in zip(before, path.busy, strict=True))
        names = ("copies out", "sums", "copies back")
        return {name: round(part / whole, 2) for name, part in zip(names, parts, strict=True)}

    def check(self, dtype: str, nbytes: int) -> None:
        """Compare a sum; this also touches all memory for the first time."""
        tensor = torch.full(
            (nbytes // DTYPES[dtype].itemsize,), self.rank + 1, dtype=DTYPES[dtype], device=self.gpu
        )
        self.reduce(tensor).wait()
        if not bool((tensor == self.ranks * (self.ranks + 1) / 2).all()):
            raise RuntimeError(f"{self.backend} adds wrongly: {dtype}, {nbytes} bytes")

    def bandwidth(self, dtype: str, nbytes: int, calls: int) -> float:
        """Return the seconds of one all-reduce of several in a row."""
        tensor = torch.zeros(nbytes // DTYPES[dtype].itemsize, dtype=DTYPES[dtype], device=self.gpu)
        self._meet()
        start = time.perf_counter()
        for _ in range(calls):
            self.reduce(tensor).wait()
        self._settle()
        return (time.perf_counter() - start) / calls

    def product(self, turns: int = 4) -> dict[str, Any]:
        """Return a product's milliseconds alone and beside all-reduces of 1 GiB, medians of turns.

        A GPU that multiplies all the time reaches its limit of power and slows down: so before each
        turn of either kind it rests for the same time.
        """
        a = torch.randn(PRODUCT, PRODUCT, device=self.gpu, dtype=torch.bfloat16)
        tensor = torch.zeros(256 * MIB, device=self.gpu)
        outlasted = True
        side: Any = torch.cuda.Stream()  # type: ignore[no-untyped-call]

        def products(count: int, calls: int = 0) -> float:
            nonlocal outlasted
            self._settle()
            self._meet()
            time.sleep(REST)
            self._meet()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record()
            for _ in range(count):
                torch.mm(a, a)
            end.record()
            # After the products, whose launches take some 10 µs each: to enqueue takes longer.
            with torch.cuda.stream(side):
                works = [self.reduce(tensor) for _ in range(calls)]
            self._settle(end)
            outlasted = outlasted and (not works or not self._is_done(works[-1]))
            for work in works:
                work.wait()
            return float(start.elapsed_time(end)) / count

        self.reduce(tensor).wait()
        products(5)
        self._settle()
        self._meet()
        begun = time.perf_counter()
        self.reduce(tensor).wait()
        self._settle()
        times = torch.tensor([(time.perf_counter() - begun) * 1e3, products(5)])
        dist.all_reduce(times, dist.ReduceOp.MAX)
        one, longest = times.tolist()
        # Enough all-reduces that they outlast a few products.
        calls = max(1, round(12 * longest / one))
        count = max(2, int(0.7 * calls * one / longest))
        alone, beside = [], []
        for turn in range(2 * turns):
            if turn % 4 in (0, 3):
                alone.append(products(count))
            else:
                beside.append(products(count, calls))
        middle = statistics.median
        return {"alone": middle(alone), "beside": middle(beside), "outlasted": outlasted}

    def cores(self) -> float:
        """Return how many cores this process keeps busy while all-reduces run."""
        tensor = torch.zeros(16 * MIB, device=self.gpu)
        self._meet()
        cpu, start = time.process_time(), time.perf_counter()
        for _ in range(40 if self.backend != "gloo" else 8):
            self.reduce(tensor).wait()
        self._settle()
        return round((time.process_time() - cpu) / (time.perf_counter() - start), 2)

    def kernels(self) -> int:
        """Return how many kernels one all-reduce launches."""
        tensor = torch.zeros(16 * MIB, device=self.gpu)
        self._meet()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=activities) as profile:
            self.reduce(tensor).wait()
            self._settle()
        events: Any = profile.events()
        on_gpu = [e.name for e in events if e.device_type == torch._C._autograd.DeviceType.CUDA]
        return sum(not name.startswith(("Memcpy", "Memset")) for name in on_gpu)

    def build(self, name: str) -> None:
        """Make a model, wrapped for data-parallel training."""
        module, run = model(name, self.gpu)
        kwargs: dict[str, Any] = {"device_ids": [self.gpu.index]}
        if self.backend == "hfreduce":
            self._model = DistributedDataParallel(module, backend="hfreduce", **kwargs)
            self._model._state.reducer.gpu(self.gpu, **self.settings)
        else:
            self._model = parallel.DistributedDataParallel(
                module, process_group=self.group, **kwargs
            )
        self._train = training(self._model, run)

    def step(self, count: int, sync: bool) -> float:
        """Return the seconds of one training step of several, with or without averaging."""
        self._meet()
        start = time.perf_counter()
        with contextlib.nullcontext() if sync else self._model.no_sync():
            for _ in range(count):
                self._train()
        self._settle()
        return (time.perf_counter() - start) / count

    def drop(self) -> None:
        """Give back the model's memory."""
        self._model, self._train = None, lambda: None
        torch.cuda.empty_cache()

    def round_trip(self, chunk: int) -> float:
        """Return the seconds that 1 GiB takes to the host and back in chunks."""
        if chunk not in self._of_chunk:
            self._of_chunk[chunk] = hfreduce.Reducer(self.store, self.rank, self.ranks, timeout=60)
        tensor = torch.zeros(256 * MIB, device=self.gpu)
        path = self._of_chunk[chunk].gpu(self.gpu, chunk_bytes=chunk)
        path.all_reduce(tensor[: chunk // 2], "sum").wait()
        self._settle()
        start = time.perf_counter()
        path.all_reduce(tensor, "sum").wait()
        self._settle()
        return time.perf_counter() - start

    def hook(self, name: str, count: int) -> dict[str, float]:
        """Return milliseconds of a step of the bare module, of DDP and of DDP with the hook."""
        if not self._hooked:
            nccl = dist.new_group(backend="nccl")
            for kind in ("module", "DDP", "hook"):
                module, run = model(name, self.gpu, sequences=32)
                wrapped: Any = module
                if kind != "module":
                    wrapped = parallel.DistributedDataParallel(
                        module, device_ids=[self.gpu.index], process_group=nccl
                    )
                if kind == "hook":
                    wrapped.register_comm_hook(hfreduce.HookState(nccl), hfreduce.average)
                self._hooked[kind] = wrapped, training(wrapped, run)
        found = {}
        for kind, (_, train) in self._hooked.items():
            self._settle()
            start = time.perf_counter()
            for _ in range(count):
                train()
            self._settle()
            found[kind] = round((time.perf_counter() - start) / count * 1e3, 3)
        return found

    def killed(self) -> float:
        """Return the seconds from the last rank's death to this one's error."""
        noted = Path(self.work, "killed")
        tensor = torch.zeros(64 * MIB, device=self.gpu)
        self._meet()
        begun = time.monotonic()
        try:
            while time.monotonic() < begun + 20:
                if self.rank == self.ranks - 1 and time.monotonic() > begun + 0.3:
                    for _ in range(3):
                        self.reduce(tensor)
                    noted.write_text(str(time.monotonic()))
                    os._exit(9)
                self.reduce(tensor).wait()
                self._settle()
        except hfreduce.PeerError:
            raised = time.monotonic()
            torch.cuda.synchronize()  # the streams are let go
            return round(raised - float(noted.read_text()), 4)
        raise RuntimeError("the death of a rank was not noticed in 20 s")

    def _path(self) -> Any:
        assert self.reducer is not None
        return self.reducer.gpu(self.gpu, **self.settings)

    def _settle(self, event: Any = None) -> None:
        """Wait until the GPU has come to an event, or has done all of the current stream's work.

        By looking: with NCCL's copy engines a thread of NCCL's calls CUDA meanwhile, which a
        synchronisation of the whole device would hold up for ever.
        """
        if event is None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
        while not event.query():
            pass

    def _meet(self) -> None:
        self._settle()
        if self.reducer is not None:
            self.reducer.barrier()
        else:
            dist.barrier()

    def _is_done(self, work: Any) -> bool:
        return bool(work.done() if self.reducer is not None else work.is_completed())


def model(
    name: str, gpu: torch.device, sequences: int = 16
) -> tuple[nn.Module, Callable[[Any], Tensor]]:
    """Return a model and what computes its loss: BERT-large of 512 tokens, VGG16 of 64 x 224²."""
    torch.manual_seed(0)
    with gpu:
        if name == "BERT-large":
            ids = torch.randint(30522, (sequences, 512))
            labels = torch.where(torch.rand(sequences, 512) < 0.15, ids, -100)
            return bert_large_MLM(30522, 512, dropout=0.0), lambda net: net(ids, None, labels).loss
        images, classes = torch.randn(64, 3, 224, 224), torch.randint(1000, (64,))
        return vgg16(), lambda net: nn.functional.cross_entropy(net(images).float(), classes)


def vgg16() -> nn.Module:
    """Return configuration D of Simonyan and Zisserman 2014 (arXiv:1409.1556), no dropout."""
    layers: list[nn.Module] = []
    channels = 3
    for width in _VGG16:
        if width:
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
            channels = width
        else:
            layers.append(nn.MaxPool2d(2))
    head = [nn.Flatten(), nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Linear(4096, 4096)]
    return nn.Sequential(*layers, *head, nn.ReLU(), nn.Linear(4096, 1000))


def training(net: nn.Module, loss_of: Callable[[Any], Tensor]) -> Callable[[], None]:
    """Return what trains a model by a step: bfloat16 autocast, torch's fused AdamW."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-5, fused=True)

    def train() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = loss_of(net)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()

    return train


def serve(pipe: Any, rank: int, ranks: int, work: str, backend: str) -> None:
    """Answer questions until told to end; an answer is (problem, value)."""
    try:
        one = Rank(rank, ranks, work, backend)
    except Exception:
        pipe.send((traceback.format_exc()[-1500:], None))
        return
    while True:
        question, arguments = pipe.recv()
        if question == "end":
            os._exit(0)  # peers may be gone: no group is left in an orderly way
        try:
            pipe.send(("", getattr(one, question)(*arguments)))
        except Exception:
            pipe.send((traceback.format_exc()[-1500:], None))
