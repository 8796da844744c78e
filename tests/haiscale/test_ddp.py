"""DistributedDataParallel trains as torch's does, whatever the model, and as one process would."""

from __future__ import annotations

import copy
import gc
import logging
import os
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from haiscale.ddp import DistributedDataParallel
from hfreduce import HookState
from tests.hfreduce.ranks import Ranks, drop_group, run

STEPS, BATCH = 3, 4


class Unused(nn.Module):
    """Rank 1 leaves a layer out, and nobody uses another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.never = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return x if dist.get_rank() == 1 else self.second(x)


class Shared(nn.Module):
    """Two layers have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class Frozen(nn.Module):
    """A layer is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.first.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(F.relu(self.first(x)))


class Embedded(nn.Module):
    """Gradients of an embedding are sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = nn.Embedding(10, 6, sparse=True), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.table((x[:, 0].abs() * 3).long() % 10))


def deep() -> nn.Module:
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(8)])


def buffers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))


class Images(nn.Module):
    """Weights and their gradients lie in the order of channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 2), nn.Linear(8, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.repeat(1, 3).view(-1, 3, 2, 3)).flatten(1))


def doubles() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).double()


def halves() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)).bfloat16()


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "deep": (deep, {"bucket_cap_mb": 0.0002}),
    "views": (deep, {"gradient_as_bucket_view": True}),
    "static": (deep, {"static_graph": True}),
    "strided": (Images, {}),
    "unused": (Unused, {"find_unused_parameters": True}),
    "unused, views": (
        Unused,
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 0.0002},
    ),
    "shared": (Shared, {}),
    "shared, static": (Shared, {"static_graph": True}),
    "frozen": (Frozen, {}),
    "sparse": (Embedded, {}),
    "buffers": (buffers, {}),
    "own buffers": (buffers, {"broadcast_buffers": False}),
    "doubles": (doubles, {}),
    "halves": (halves, {}),
}


def batch(rank: int, step: int, model: nn.Module) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    return torch.randn(BATCH, 6, generator=generator).to(dtype)


def trained(ddp: nn.Module, rank: int, accumulate: bool = False) -> list[Tensor]:
    """Return all parameters and buffers after some steps."""
    optimizer = torch.optim.SGD([p for p in ddp.parameters() if p.requires_grad], lr=0.1)
    for step in range(STEPS):
        if accumulate:
            with ddp.no_sync():  # type: ignore[operator]
                ddp(batch(rank, 50 + step, ddp)).square().mean().backward()
        ddp(batch(rank, step, ddp)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [value.detach().clone() for value in ddp.state_dict().values()]


def start(backend: str, rank: int, world: int, store: str) -> None:
    dist.init_process_group(
        backend, store=dist.FileStore(store, world), rank=rank, world_size=world
    )
    torch.manual_seed(7 + rank)  # ranks start differently: rank 0's model counts


def parity(rank: int, world: int, store: str, backend: str) -> int:
    start(backend, rank, world, store)
    checked = 0
    for name, (make, options) in CASES.items():
        for accumulate in (False, True):
            if accumulate and "static_graph" in options:
                continue  # torch itself does not take no_sync in a static graph's first step
            model = make()
            theirs = TorchDDP(copy.deepcopy(model), **options)
            ours = DistributedDataParallel(copy.deepcopy(model), **options)
            expected = trained(theirs, rank, accumulate)
            found = trained(ours, rank, accumulate)
            assert ours.path == "hfreduce", ours.path
            for a, b in zip(found, expected, strict=True):
                torch.testing.assert_close(a, b, msg=lambda text: f"{name}: {text}")  # noqa: B023
            checked += 1
    drop_group()
    return checked


@pytest.mark.parametrize("backend", ["gloo", "hfreduce"])
def test_models_of_all_kinds_train_as_with_torchs(backend: str) -> None:
    assert (
        run(parity, 2, backend)
        == [sum(1 + ("static_graph" not in o) for _, o in CASES.values())] * 2
    )


def one_process(rank: int, world: int, store: str) -> list[bytes]:
    start("gloo", rank, world, store)
    torch.manual_seed(3)
    model = deep()
    alone = copy.deepcopy(model)
    found = trained(DistributedDataParallel(model), rank)
    optimizer = torch.optim.SGD(alone.parameters(), lr=0.1)
    for step in range(STEPS):
        whole = torch.cat([batch(peer, step, alone) for peer in range(world)])
        alone(whole).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for a, b in zip(found, alone.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)
    drop_group()
    return [value.numpy().tobytes() for value in found]


def test_ranks_train_as_one_process_with_the_whole_batch_and_end_with_equal_bits() -> None:
    first, second, third = run(one_process, 3)
    assert first == second == third


def uneven(rank: int, world: int, store: str, by_initial: bool) -> None:
    start("gloo", rank, world, store)
    results = []
    model = deep()
    for kind in (TorchDDP, DistributedDataParallel):
        ddp = kind(copy.deepcopy(model), bucket_cap_mb=0.0002)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        with ddp.join(divide_by_initial_world_size=by_initial):
            # One rank has nothing at all, another ends before the last.
            for step in range((0, 2, 4)[rank]):
                ddp(batch(rank, step, ddp)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        results.append([value.clone() for value in ddp.state_dict().values()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    drop_group()


@pytest.mark.parametrize("by_initial", [True, False])
def test_ranks_may_run_out_of_data(by_initial: bool) -> None:
    run(uneven, 3, by_initial)


def scaled(rank: int, world: int, store: str) -> None:
    start("gloo", rank, world, store)
    model = deep()
    results = []
    for kind in (TorchDDP, DistributedDataParallel):
        ddp = kind(copy.deepcopy(model))
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        for step in range(4):
            with torch.autocast("cpu", torch.bfloat16):
                loss = ddp(batch(rank, step, ddp)).square().mean()
            if step == 1:
                loss = loss * float("inf")  # this step is skipped on all ranks
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append([*ddp.state_dict().values(), torch.tensor(scaler.get_scale())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    drop_group()


def test_mixed_precision_and_its_scaler_work_as_with_torchs() -> None:
    run(scaled, 2)


def details(rank: int, world: int, store: str) -> None:
    start("gloo", rank, world, store)
    before = threading.active_count()
    model = DistributedDataParallel(deep(), process_group=dist.new_group([0, 1]))
    assert isinstance(model, TorchDDP)
    model(torch.ones(2, 6)).sum().backward()
    model.reducer.stop()
    assert model.reducer._rebuild_buckets() in (True, False)  # torch's is reached through it
    assert all(name.startswith("module.") for name in model.state_dict())
    model.module.load_state_dict(deep().state_dict())
    again = DistributedDataParallel(deep())
    restored = pickle.loads(pickle.dumps(again))
    restored(torch.ones(2, 6)).sum().backward()
    assert restored.path == "hfreduce"
    restored.reducer.stop()
    torchs = DistributedDataParallel(deep(), backend="torch")
    torchs(torch.ones(2, 6)).sum().backward()
    assert torchs.path == "torch: it was asked for"
    with pytest.raises(ValueError, match="backend='nccl' is not known: use one of auto, hfreduce"):
        DistributedDataParallel(deep(), backend="nccl")
    del model, again, restored, torchs
    gc.collect()
    assert threading.active_count() == before
    drop_group()


def test_it_is_torchs_class_with_a_stop_and_leaves_no_thread() -> None:
    run(details, 2)


def own_hook(rank: int, world: int, store: str) -> int:
    start("gloo", rank, world, store)
    calls = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        calls.append(bucket.index())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    hook.__annotations__.clear()  # torch compares them as types
    model = DistributedDataParallel(deep())
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 6)).sum().backward()
    assert "hook of the script's" in model.path
    drop_group()
    return len(calls)


def test_a_script_that_registers_its_own_hook_keeps_it() -> None:
    assert all(count >= 1 for count in run(own_hook, 2))


def dies_in_backward(rank: int, world: int, store: str) -> str:
    start("hfreduce", rank, world, store)
    model = DistributedDataParallel(deep())
    for _ in range(3):
        model(torch.ones(2, 6)).sum().backward()
    if rank == 1:
        os._exit(1)
    try:
        model(torch.ones(2, 6)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_backward_raises_and_names_the_rank_that_died() -> None:
    said = Ranks(dies_in_backward, 2).join()[0].value
    assert "DeadPeerError: all_reduce: rank 1" in said


def says_once(rank: int, world: int, store: str) -> list[str]:
    start("gloo", rank, world, store)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("haiscale.ddp")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    model = DistributedDataParallel(deep())
    for _ in range(2):
        model(torch.ones(2, 6)).sum().backward()
    drop_group()
    return said


def test_rank_0_says_once_who_averages() -> None:
    first, second = run(says_once, 2)
    assert first == ["DistributedDataParallel averages through hfreduce"]
    assert second == []


def test_the_originals_names_are_the_same_class() -> None:
    from hfai.nn import parallel

    assert parallel.DistributedDataParallel is DistributedDataParallel


def alone_first(rank: int, world: int, store: str) -> list[str]:
    start("gloo", rank, world, store)
    model = DistributedDataParallel(deep())
    copied = copy.deepcopy(model) if rank == 0 else None
    if rank == 0:
        model(torch.ones(2, 6))
        assert copied is not None
        with torch.no_grad():
            copied(torch.ones(2, 6))
    dist.barrier()
    model(torch.ones(2, 6)).sum().backward()
    again = pickle.loads(pickle.dumps(model))  # it has been trained
    again(torch.ones(2, 6)).sum().backward()
    for a, b in zip(again.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    paths = [model.path, again.path]
    drop_group()
    return paths


def test_one_rank_may_run_and_copy_the_model_alone_before_training() -> None:
    assert run(alone_first, 2) == [["hfreduce", "hfreduce"]] * 2


def compiled(rank: int, world: int, store: str) -> str:
    start("gloo", rank, world, store)
    results = []
    for kind in (TorchDDP, DistributedDataParallel):
        torch.manual_seed(3)
        model = kind(nn.Linear(6, 6))
        step = torch.compile(model, backend="eager")
        for turn in range(2):
            step(batch(rank, turn, model)).square().mean().backward()
        results.append([parameter.grad for parameter in model.parameters()])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)
    drop_group()
    return str(model.path)


def test_a_compiled_model_trains() -> None:
    assert run(compiled, 2) == ["hfreduce"] * 2


def with_timeout(rank: int, world: int, store: str) -> float:
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=17),
    )
    model = DistributedDataParallel(deep())
    seconds = model._state.reducer.timeout
    assert HookState().reducer.timeout == seconds
    drop_group()
    return float(seconds)


def test_the_groups_own_timeout_counts() -> None:
    assert run(with_timeout, 2) == [17.0] * 2


def single(rank: int, world: int, store: str) -> str:
    start("gloo", rank, world, store)
    model = DistributedDataParallel(deep(), backend="hfreduce")
    model(torch.ones(2, 6)).sum().backward()
    drop_group()
    return str(model.path)


def test_one_process_may_ask_for_hfreduce() -> None:
    assert run(single, 1) == ["torch: there is one rank"]


def narrow(rank: int, world: int, store: str) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(0)
    model = deep()
    grads = []
    for peer in range(world):
        one = copy.deepcopy(model)
        one(batch(peer, 0, one)).square().mean().backward()
        grads.append([param.grad.bfloat16().float() for param in one.parameters()])
    ddp = DistributedDataParallel(model, backend="hfreduce", wire=torch.bfloat16)
    for _ in range(2):  # buckets are made anew after the first step
        ddp.zero_grad()
        ddp(batch(rank, 0, ddp)).square().mean().backward()
        for param, *parts in zip(model.parameters(), *grads, strict=True):
            mean = torch.stack(parts).sum(0).div(world).bfloat16().float()
            assert torch.equal(param.grad, mean)
    with pytest.raises(ValueError, match=r"wire=torch\.int8"):
        DistributedDataParallel(deep(), wire=torch.int8)
    dist.barrier()
    drop_group()


def test_a_narrow_wire_rounds_gradients_and_once_their_average() -> None:
    run(narrow, 2)


def on_two_nodes(rank: int, world: int, store: str) -> None:
    os.environ["HFREDUCE_NODE"] = str(rank // 2)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    torch.manual_seed(0)
    module = deep()
    auto = DistributedDataParallel(copy.deepcopy(module))
    asked = DistributedDataParallel(copy.deepcopy(module), backend="hfreduce")
    for one, two in zip(trained(auto, rank), trained(asked, rank), strict=True):
        torch.testing.assert_close(one, two)
    assert asked.path == "hfreduce"
    assert "not on one machine" in auto.path
    dist.barrier()
    drop_group()


def test_between_machines_hfreduce_averages_where_it_is_asked_for() -> None:
    run(on_two_nodes, 4)
