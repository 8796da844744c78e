"""HostAdamW trains as torch's AdamW does on the average gradients, and its state is torch's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist

from haiscale.host_adamw import HostAdamW
from tests.hfreduce.ranks import drop_group, reducer, run

STEPS = 5


class Model(nn.Module):
    """Has a layer that only rank 1 uses, one that nobody does, a frozen one, and two groups."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(17, 17) for _ in range(3))
        self.never, self.frozen = nn.Linear(3, 3), nn.Linear(17, 17).requires_grad_(False)

    def forward(self, x: Tensor, rank: int) -> Tensor:
        x = self.frozen(self.first(x).relu())
        return self.third(x if rank != 1 else self.second(x))


def groups(model: nn.Module) -> list[dict[str, Any]]:
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "weight_decay": 0.0, "lr": 3e-3},
    ]


def backward(model: Any, rank: int, step: int, accumulate: int, share: float) -> None:
    for part in range(accumulate):
        generator = torch.Generator().manual_seed(1000 * step + 10 * part + rank)
        x = torch.randn(8, 17, generator=generator)
        dtype = next(model.parameters()).dtype
        (model(x.to(dtype), rank).float().square().mean() * share).backward()


def seeded(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(3)
    return Model().to(dtype)


def reference(world: int, clip: float | None, accumulate: int) -> tuple[Any, Any]:
    """Train in one process on all ranks' batches, by torch."""
    model = seeded()
    optimizer = torch.optim.AdamW(groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        for rank in range(world):
            backward(model, rank, step, accumulate, 1 / world)
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return model, optimizer


def trained(
    rank: int, world: int, store: str, clip: float | None, accumulate: int, bucket_bytes: int
) -> None:
    group = reducer(rank, world, store)
    model = seeded()
    if rank:  # all start with rank 0's
        torch.nn.init.zeros_(model.first.weight)
    optimizer = HostAdamW(groups(model), lr=1e-2, reducer=group, bucket_bytes=bucket_bytes)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        backward(model, rank, step, accumulate, 1.0)
        if clip is not None:
            assert optimizer.clip_grad_norm_(clip) > clip
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    theirs, plain = reference(world, clip, accumulate)
    for (name, one), other in zip(model.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6, msg=name)
    mine, expected = optimizer.state_dict(), plain.state_dict()
    assert mine["state"].keys() == expected["state"].keys()
    for number, state in expected["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(mine["state"][number][name], value, rtol=1e-4, atol=1e-7)
    # All ranks have the same bits.
    row = torch.cat([param.detach().flatten() for param in model.parameters()])
    group.all_reduce(low := row.clone(), "min")
    group.all_reduce(high := row.clone(), "max")
    assert torch.equal(low, high)
    group.barrier()


@pytest.mark.parametrize(
    ("clip", "accumulate", "bucket_bytes"),
    [(None, 1, 25 << 20), (0.05, 1, 600), (None, 3, 600), (0.05, 3, 25 << 20)],
    ids=["plain", "clipped, many buckets", "accumulated, many buckets", "both"],
)
def test_training_is_torchs_on_the_global_batch(
    clip: float | None, accumulate: int, bucket_bytes: int
) -> None:
    run(trained, 3, clip, accumulate, bucket_bytes)


def test_without_other_ranks_it_is_torchs() -> None:
    model = seeded()
    optimizer = HostAdamW(groups(model), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(STEPS):
        backward(model, 0, step, 1, 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    theirs, _ = reference(1, None, 1)
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def resumed(rank: int, world: int, store: str, dtype: torch.dtype) -> None:
    group = reducer(rank, world, store)
    model = seeded(dtype)

    def steps(model: Any, optimizer: HostAdamW, first: int, last: int) -> None:
        for step in range(first, last):
            backward(model, rank, step, 1, 1.0)
            optimizer.step()
            optimizer.zero_grad()

    optimizer = HostAdamW(groups(model), lr=1e-2, reducer=group)
    steps(model, optimizer, 0, 3)
    kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    steps(model, optimizer, 3, 6)
    again = seeded(dtype)
    other = HostAdamW(groups(again), lr=0.5, reducer=group, bucket_bytes=500)
    again.load_state_dict(kept[0])
    other.load_state_dict(kept[1])
    assert other.param_groups[0]["lr"] == 1e-2
    steps(again, other, 3, 6)
    for one, two in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, two)
    group.barrier()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_saved_state_goes_on_with_the_same_bits_in_other_buckets(dtype: torch.dtype) -> None:
    run(resumed, 2, dtype)


def from_torch(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    theirs, plain = reference(world, None, 1)
    model = copy.deepcopy(theirs)
    optimizer = HostAdamW(groups(model), lr=1e-2, reducer=group)
    optimizer.load_state_dict(plain.state_dict())
    second = torch.optim.AdamW(groups(theirs), lr=1e-2)
    second.load_state_dict(optimizer.state_dict())  # and back
    for peer in range(world):
        backward(theirs, peer, 9, 1, 1 / world)
    second.step()
    backward(model, rank, 9, 1, 1.0)
    optimizer.step()
    for one, other in zip(model.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-6)
    group.barrier()


def test_states_go_from_torchs_adamw_and_back() -> None:
    run(from_torch, 2)


def masters(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    model = nn.Linear(64, 64, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = HostAdamW(model.parameters(), lr=1e-3, weight_decay=0.0, reducer=group)
    for _ in range(20):  # each less than half of bfloat16's step below 1, which is 0.0039
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
    assert (model.weight.float() - 0.98).abs().max() < 0.003
    with torch.no_grad():
        model.weight.fill_(2.0)  # someone else's doing counts
    optimizer.step()
    assert (model.weight > 1.9).all()
    group.barrier()


def test_steps_too_small_for_bfloat16_add_up_in_the_master_weights() -> None:
    run(masters, 2)


def wide() -> nn.Parameter:
    return nn.Parameter(torch.ones(100, dtype=torch.bfloat16))


def stepped(optimizer: Any, *params: nn.Parameter, times: int = 1) -> None:
    for _ in range(times):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()


def test_a_master_weight_that_torch_left_behind_does_not_revert_the_weights() -> None:
    weight = wide()
    ours = HostAdamW([weight], lr=0.1, weight_decay=0.0)
    stepped(ours, weight)
    theirs = torch.optim.AdamW([weight], lr=0.1, weight_decay=0.0)
    theirs.load_state_dict(ours.state_dict())
    stepped(theirs, weight, times=5)  # "master" is in the state, as it was
    again = HostAdamW([weight], lr=0.1, weight_decay=0.0)
    again.load_state_dict(theirs.state_dict())
    assert (again.state_dict()["state"][0]["master"] - 0.4).abs().max() < 0.01
    stepped(again, weight)
    assert (weight.float() - 0.3).abs().max() < 0.01


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_what_is_written_through_data_counts(dtype: torch.dtype) -> None:
    weight = nn.Parameter(torch.full((100,), 5.0, dtype=dtype))
    optimizer = HostAdamW([weight], lr=1e-3, weight_decay=0.0)
    stepped(optimizer, weight)
    weight.data.clamp_(-0.01, 0.01)
    stepped(optimizer, weight)
    assert (weight.float() - 0.009).abs().max() < 1e-4
    weight.data = torch.zeros(100, dtype=dtype)
    stepped(optimizer, weight)
    assert (weight.float() + 0.001).abs().max() < 1e-4


def test_writing_to_one_parameter_leaves_the_master_weights_of_others() -> None:
    weight, scale = wide(), nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    optimizer = HostAdamW([weight, scale], lr=1e-4, weight_decay=0.0)
    for _ in range(100):
        stepped(optimizer, weight, scale)
        with torch.no_grad():
            scale.clamp_(0.5, 0.6)
    assert (weight.float() - 0.99).abs().max() < 0.003


def test_the_optimizer_may_be_loaded_before_the_model() -> None:
    weight = wide()
    optimizer = HostAdamW([weight], lr=1e-4, weight_decay=0.0)
    stepped(optimizer, weight, times=9)
    state, kept = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    assert (state["state"][0]["master"] - 0.9991).abs().max() < 1e-5
    again = nn.Parameter(torch.zeros_like(weight))
    other = HostAdamW([again], lr=1e-4, weight_decay=0.0)
    other.load_state_dict(state)
    with torch.no_grad():
        again.copy_(kept)
    stepped(other, again, times=15)
    assert (other.state_dict()["state"][0]["master"] - 0.9976).abs().max() < 1e-5


def test_a_gradient_changed_after_clipping_counts_as_it_then_is() -> None:
    ours, theirs = ([nn.Parameter(torch.ones(4)) for _ in range(4)] for _ in range(2))
    one, two = HostAdamW(ours, lr=0.1), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(2):
        for params, clip in (
            (ours, one.clip_grad_norm_),
            (theirs, lambda norm: nn.utils.clip_grad_norm_(theirs, norm)),
        ):
            for param in params:
                param.grad = torch.full((4,), 1.0 + step)
            clip(1.0)
            params[0].grad = torch.full((4,), -5.0)
            params[1].grad = None
            params[2].grad.mul_(0.0)
        one.step()
        two.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other)
    before = [param.detach().clone() for param in ours]
    one.clip_grad_norm_(1.0)
    one.zero_grad()
    one.step()
    assert all(torch.equal(a, b) for a, b in zip(before, ours, strict=True))


def refuses(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    for lr, size in ((1e-3 * (1 + rank), 3), (1e-3, 3)):
        params = [nn.Parameter(torch.ones(size)) for _ in range(2)]
        groups = [{"params": params[:1], "weight_decay": 0.1 * (rank if lr == 1e-3 else 0)}]
        with pytest.raises(ValueError, match="different groups or settings"):
            HostAdamW([*groups, {"params": params[1:]}], lr=lr, reducer=group)
    params = [nn.Parameter(torch.ones(300)), nn.Parameter(torch.ones(200))]
    optimizer = HostAdamW(params, lr=0.5, reducer=group)
    plain = torch.optim.AdamW(params, lr=0.1)
    stepped(plain, *params)
    good = plain.state_dict()
    bad = copy.deepcopy(good)
    bad["state"][1]["exp_avg"] = torch.ones(7)
    said = r"parameter of \(7,\)" if rank else "another rank refused this call"
    with pytest.raises(ValueError, match=said):
        optimizer.load_state_dict(bad if rank else good)
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert not optimizer.state_dict()["state"]
    if rank:
        params[0].grad = torch.ones(300).to_sparse()
    with pytest.raises(RuntimeError, match="sparse" if rank else "another rank refused"):
        optimizer.step()
    group.barrier()


def test_what_one_rank_refuses_all_do_before_anything_changes() -> None:
    run(refuses, 2)


def wired(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    results = []
    for wire in (None, torch.bfloat16):
        model = seeded()
        optimizer = HostAdamW(groups(model), lr=1e-3, reducer=group, wire=wire)
        for step in range(STEPS):
            backward(model, rank, step, 1, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results.append([param.detach().clone() for param in model.parameters()])
    differences = [(a - b).abs().max() for a, b in zip(*results, strict=True)]
    assert 0 < max(differences) < 3e-3
    group.barrier()


def test_a_narrow_wire_changes_gradients_by_rounding_alone() -> None:
    run(wired, 2)


def refused(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    with pytest.raises(ValueError, match="the ranks have different parameters"):
        HostAdamW(nn.Linear(3 + rank, 3).parameters(), reducer=group)
    group.barrier()


def test_ranks_with_different_parameters_are_refused_on_all() -> None:
    run(refused, 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: HostAdamW(p, lr=-1.0), "Invalid learning rate"),
        (lambda p: HostAdamW(p, wire=torch.int8), "wire=torch.int8 is not known"),
        (lambda p: HostAdamW([torch.ones(3, dtype=torch.cfloat, requires_grad=True)]), "complex64"),
        (lambda p: HostAdamW(p).clip_grad_norm_(0.0), "max_norm=0.0 is not positive"),
        (
            lambda p: HostAdamW(p).load_state_dict({"param_groups": [], "state": {}}),
            r"groups of \[\]",
        ),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(make: Callable[[Any], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make([nn.Parameter(torch.ones(3))])


def on_default_group(rank: int, world: int, store: str) -> None:
    shared = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world)
    weight = nn.Parameter(torch.zeros(3))
    optimizer = HostAdamW([weight], lr=1.0, weight_decay=0.0)
    weight.grad = torch.full((3,), 2.0 * rank - 0.5)  # the average is positive, rank 0's is not
    optimizer.step()
    assert (weight < 0).all()
    dist.barrier()
    drop_group()


def test_the_default_process_group_is_averaged_over() -> None:
    run(on_default_group, 2)


def in_layouts(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    made = []
    for _ in range(2):
        torch.manual_seed(1)
        # Not contiguous, or in others' memory; the shards' border lies within a parameter.
        turned = nn.Parameter(torch.randn(30, 40).t())
        part = nn.Parameter(torch.randn(70)[5:65])
        images = nn.Parameter(torch.randn(4, 3, 5, 5).to(memory_format=torch.channels_last))
        made.append([turned, part, nn.Parameter(torch.randn(33)), images])
    ours, theirs = made
    optimizer, plain = HostAdamW(ours, lr=0.1, reducer=group), torch.optim.AdamW(theirs, lr=0.1)
    for step in range(4):
        for at, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            generator = torch.Generator().manual_seed(10 * step + at)
            other.grad = torch.randn(other.shape, generator=generator)
            one.grad = other.grad.clone() * (2 * rank)  # of ranks 0 and 1 the average
        assert optimizer.clip_grad_norm_(1.0) > 1
        optimizer.state_dict()  # leaves what was averaged as it is
        nn.utils.clip_grad_norm_(theirs, 1.0)
        if step == 2:  # other memory, with the same values
            ours[2].data = ours[2].data.clone()
            ours[1].data = torch.stack([ours[1].data] * 2, 1)[:, 0]
        optimizer.step()
        plain.step()
        for one, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(one, other)
    group.barrier()


def test_parameters_of_any_memory_layout_are_stepped() -> None:
    run(in_layouts, 2)


def test_autograd_notices_that_a_step_has_changed_what_it_kept() -> None:
    weight = nn.Parameter(torch.ones(3))
    optimizer = HostAdamW([weight], lr=0.1)
    kept = (weight * weight).sum()
    weight.grad = torch.ones(3)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()
