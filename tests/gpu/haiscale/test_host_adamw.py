"""HostAdamW and the narrow wire with parameters on GPUs; ranks may share one."""

from __future__ import annotations

import copy

import torch
from torch import distributed as dist
from torch import nn

from haiscale.ddp import DistributedDataParallel
from haiscale.host_adamw import HostAdamW
from tests.gpu.hfreduce.test_cuda_path import device
from tests.hfreduce.ranks import drop_group, run

STEPS = 5


def deep() -> nn.Module:
    torch.manual_seed(4)
    return nn.Sequential(*[nn.Linear(300, 300) for _ in range(5)])


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(32, 300, generator=torch.Generator().manual_seed(100 * step + rank))


def trains(rank: int, world: int, store: str) -> None:
    gpu = device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    ours, theirs = deep().to(gpu), deep()
    optimizer = HostAdamW(ours.parameters(), lr=1e-3, bucket_bytes=300_000)
    plain = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    for step in range(STEPS):
        ours(batch(rank, step).to(gpu)).square().mean().backward()
        optimizer.clip_grad_norm_(0.05)
        optimizer.step()
        optimizer.zero_grad()
        for peer in range(world):
            (theirs(batch(peer, step)).square().mean() / world).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.05)
        plain.step()
        plain.zero_grad()
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=1e-3, atol=1e-4)
    dist.barrier()
    drop_group()


def test_the_host_steps_parameters_of_gpus_as_torchs_adamw_does() -> None:
    run(trains, 2, timeout=120)


def test_a_state_of_torch_on_a_gpu_is_taken_to_the_host() -> None:
    weight = nn.Parameter(torch.ones(100, device="cuda"))
    plain = torch.optim.AdamW([weight], lr=0.1)
    weight.grad = torch.ones_like(weight)
    plain.step()
    optimizer = HostAdamW([weight], lr=0.1)
    optimizer.load_state_dict(plain.state_dict())
    assert all(value.is_cpu for value in optimizer.state_dict()["state"][0].values())
    before = weight.detach().clone()
    optimizer.step()
    plain_step = before - weight
    with torch.no_grad():
        weight.copy_(before)
    plain.step()
    torch.testing.assert_close(plain_step, before - weight, rtol=1e-3, atol=1e-5)


def wired(rank: int, world: int, store: str) -> None:
    gpu = device(rank)
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    model = deep().to(gpu)
    grads = []
    for peer in range(world):
        one = copy.deepcopy(model)
        one(batch(peer, 0).to(gpu)).square().mean().backward()
        grads.append([param.grad.bfloat16().float() for param in one.parameters()])
    expected = [(sum(parts) / world).bfloat16().float() for parts in zip(*grads, strict=True)]
    ddp = DistributedDataParallel(
        model, device_ids=[gpu.index], backend="hfreduce", wire=torch.bfloat16, bucket_cap_mb=1
    )
    for _ in range(2):  # buckets are made anew after the first step
        ddp.zero_grad()
        ddp(batch(rank, 0).to(gpu)).square().mean().backward()
        for param, mean in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(param.grad, mean, rtol=2**-7, atol=1e-6)
    dist.barrier()
    drop_group()


def test_a_narrow_wire_rounds_gradients_and_their_average() -> None:
    run(wired, 2, timeout=120)
