"""Many ranks: real processes with gloo, sharded and replicated models, other numbers of ranks."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hfai import checkpoint
from hfai.checkpoint.contents import CheckpointFiles
from hfai.checkpoint.verify import verify
from tests.checkpoint.training import Training, same
from tests.hfreduce.ranks import Ranks, leave, run

WORLDS = (1, 2, 3, 4)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(10, 37)
        self.norm = nn.BatchNorm1d(37)
        self.last = nn.Linear(37, 7)

    def forward(self, x: Tensor) -> Any:
        return self.last(torch.tanh(self.norm(self.first(x))))


def start(rank: int, world: int, store: str) -> None:
    shared: Any = dist.FileStore(store, world)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    losses = []
    for step in range(count):
        torch.manual_seed(step)
        loss = model(torch.randn(4, 10)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def whole(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """All tensors, whole, of a sharded training."""
    found = dict(model.state_dict())
    for name, parameter in model.named_parameters():
        found.update({f"{name}/{k}": v for k, v in optimizer.state.get(parameter, {}).items()})
    return {
        name: t.full_tensor() if isinstance(t, DTensor) else t.clone() for name, t in found.items()
    }


def sharded(mesh: DeviceMesh, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model: Any = Small()
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def reshard(rank: int, world: int, store: str, directory: str) -> list[str]:
    """Save on 1, 2, 3 and 4 ranks, and load each on all of these; return what went wrong."""
    start(rank, world, store)
    wrong = []
    meshes = {count: DeviceMesh("cpu", list(range(count))) for count in WORLDS}
    for count in WORLDS:
        if rank < count:
            model, optimizer = sharded(meshes[count], 0)
            train(model, optimizer, 2)
            path, group = f"{directory}/from{count}", meshes[count].get_group()
            checkpoint.save(path, model, optimizer, group=group, threads=1)
            tensors = whole(model, optimizer)
            if rank == 0:
                torch.save(tensors, f"{path}.pt")
        dist.barrier()
    for source in WORLDS:
        expected = torch.load(f"{directory}/from{source}.pt")
        for count in WORLDS:
            if rank < count:
                model, optimizer = sharded(meshes[count], 7)
                path = f"{directory}/from{source}"
                checkpoint.load_into(path, model, optimizer, rank=rank, threads=1)
                if not same(whole(model, optimizer), expected):
                    wrong.append(f"{source} to {count} on rank {rank}")
    leave()
    return wrong


def test_fsdp2_loads_onto_any_number_of_ranks_bit_for_bit(tmp_path: Path) -> None:
    for wrong in run(reshard, 4, str(tmp_path), timeout=120):
        assert wrong == []
    for count in WORLDS:
        expected = torch.load(tmp_path / f"from{count}.pt")
        loaded = checkpoint.load(tmp_path / f"from{count}")["model"]
        assert same(loaded, {name: t for name, t in expected.items() if "/" not in name})
        with CheckpointFiles(tmp_path / f"from{count}") as files:
            assert verify(files, 1) == []
            assert files.commit.world == count


def tensor_parallel(rank: int, world: int, store: str, directory: str) -> list[str]:
    """Tensors spread every way over meshes of two dimensions and of one, read by all others."""
    start(rank, world, store)
    two, one = DeviceMesh("cpu", [[0, 1], [2, 3]]), DeviceMesh("cpu", [0, 1, 2, 3])
    ways = [
        (two, (Shard(0), Shard(1))),
        (two, (Replicate(), Shard(1))),
        (two, (Shard(1), Replicate())),
        (two, (Shard(0), Shard(0))),
        (one, (Shard(1),)),
        (one, (Replicate(),)),
    ]
    torch.manual_seed(1)
    shapes = [(9, 6), (3, 5), (1, 700), (600, 1024)]
    plain = {f"t{at}": torch.randn(shape) for at, shape in enumerate(shapes)}

    def spread(number: int, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        mesh, places = ways[number]
        return {name: distribute_tensor(t, mesh, places) for name, t in tensors.items()}

    wrong = []
    for source in range(len(ways)):
        checkpoint.save(f"{directory}/way{source}", spread(source, plain), threads=1)
    for source in range(len(ways)):
        for target in range(len(ways)):
            into = spread(target, {name: torch.zeros_like(t) for name, t in plain.items()})
            checkpoint.load_into(f"{directory}/way{source}", into, threads=1)
            for name, tensor in into.items():
                full: Any = tensor
                if not torch.equal(full.full_tensor(), plain[name]):
                    wrong.append(f"{name} from {ways[source][1]} to {ways[target][1]}")
    leave()
    return wrong


def test_dtensors_of_any_placement_load_onto_any_other(tmp_path: Path) -> None:
    for wrong in run(tensor_parallel, 4, str(tmp_path), timeout=120):
        assert wrong == []
    for at in range(6):
        with CheckpointFiles(tmp_path / f"way{at}") as files:
            assert verify(files, 1) == []
            sizes = [index.size - index.header for index in files.indexes()]
        assert max(sizes) <= 1.2 * sum(sizes) / 4 + 8192, "no rank writes more than its share"


def replicated(rank: int, world: int, store: str, directory: str) -> Any:
    """Train with DDP, save twice without a collective, go on; and from the checkpoint once more."""
    start(rank, world, store)
    torch.manual_seed(0)
    model: Any = nn.parallel.DistributedDataParallel(nn.Sequential(Small(), nn.Linear(7, 40_000)))
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer, 2)
    with torch.no_grad():
        model.module[0].norm.running_mean.fill_(rank)  # buffers differ: the first rank's count
    own = {"position": 10 * rank, "state": torch.full((2,), float(rank))}
    checkpoint.save(f"{directory}/a", model, optimizer, per_rank=own, others={"r": rank}, threads=1)
    before = _collectives()
    checkpoint.save(f"{directory}/b", model, optimizer, per_rank=own, threads=1)
    during = _collectives() - before
    expected = train(model, optimizer, 2)
    loaded = checkpoint.load_into(f"{directory}/a", model, optimizer, threads=1)
    mean = float(model.module[0].norm.running_mean[0])
    with torch.no_grad():
        model.module[0].norm.running_mean.fill_(rank)
    got = train(model, optimizer, 2)
    leave()
    position = loaded.per_rank["position"], float(loaded.per_rank["state"][0])
    return expected == got, position, loaded.others, mean, during


def _collectives() -> int:
    """How many collectives the default group has made."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())


def test_ddp_saves_by_shares_without_collectives_and_goes_on(tmp_path: Path) -> None:
    for rank, found in enumerate(run(replicated, 3, str(tmp_path), timeout=60)):
        equal, position, others, mean, collectives = found
        assert equal
        assert position == (10 * rank, float(rank))
        assert others == {"r": 0}
        assert mean == 0.0
        assert collectives == 0
    with CheckpointFiles(tmp_path / "a") as files:
        assert verify(files, 1) == []
        sizes = [index.size - index.header for index in files.indexes()]
    assert max(sizes) < 1.1 * sum(sizes) / 3
    plain = nn.Sequential(Small(), nn.Linear(7, 40_000))
    optimizer = torch.optim.Adam(plain.parameters())
    checkpoint.load_into(tmp_path / "a", plain, optimizer)


def pipeline(rank: int, world: int, store: str, directory: str) -> bool:
    """Each rank has a stage of its own and its optimizer."""
    start(rank, world, store)
    torch.manual_seed(rank)
    stage = nn.ModuleDict({f"stage{rank}": nn.Linear(3 + rank, 4)})
    optimizer = torch.optim.Adam(stage.parameters())
    stage[f"stage{rank}"](torch.ones(3 + rank)).sum().backward()
    optimizer.step()
    checkpoint.save(f"{directory}/a", stage, optimizer, threads=1)
    kept = {name: t.clone() for name, t in stage.state_dict().items()}
    with torch.no_grad():
        stage[f"stage{rank}"].weight.zero_()
    checkpoint.load_into(f"{directory}/a", stage, optimizer, strict=False, threads=1)
    leave()
    return same(stage.state_dict(), kept)


def test_ranks_with_stages_of_their_own_save_one_checkpoint(tmp_path: Path) -> None:
    assert all(run(pipeline, 2, str(tmp_path)))
    both = nn.ModuleDict({"stage0": nn.Linear(3, 4), "stage1": nn.Linear(4, 4)})
    optimizer = torch.optim.Adam(both.parameters())
    checkpoint.load_into(tmp_path / "a", both, optimizer)
    assert len(optimizer.state) == 4


def fewer(rank: int, world: int, store: str, directory: str) -> None:
    """Save on three ranks, and again by that name on two."""
    start(rank, world, store)
    two = dist.new_group([0, 1])
    value = {"w": torch.full((3000,), 3.0)}
    checkpoint.save(f"{directory}/a", value, rng=False, threads=1)
    if rank < 2:
        value["w"].fill_(2.0)
        checkpoint.save(f"{directory}/a", value, rng=False, group=two, threads=1)
    leave()


def test_nothing_of_a_larger_world_stays(tmp_path: Path) -> None:
    run(fewer, 3, str(tmp_path))
    found = {name for name in os.listdir(tmp_path / "a") if name.startswith("rank-")}
    assert {name.partition(".")[0] for name in found} == {"rank-00000", "rank-00001"}
    assert (checkpoint.load(tmp_path / "a")["model"]["w"] == 2).all()


class Pair(nn.Module):
    """Two layers that are spread over a tensor-parallel mesh."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(10, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Any:
        return self.down(torch.relu(self.up(x)))


def kinds(ranks: int, seed: int) -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
    """Return a plain, a DDP, an FSDP2, a tensor-parallel and a 2D model (both), each trained."""
    torch.manual_seed(seed)
    line = init_device_mesh("cpu", (ranks,))
    square = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("data", "tensor"))
    plan: Any = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    full: Any = Pair()
    fully_shard(full, mesh=line)
    both: Any = parallelize_module(Pair(), square["tensor"], plan)
    fully_shard(both, mesh=square["data"])
    models: list[Any] = [
        Pair(),
        nn.parallel.DistributedDataParallel(Pair()),
        full,
        parallelize_module(Pair(), line, plan),
        both,
    ]
    return models, [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]


def mixed(rank: int, world: int, store: str, directory: str) -> bool:
    """Save models of every kind at once, or load what others saved; whether the bits are those."""
    start(rank, world, store)
    saved = f"{directory}/a"
    models, optimizers = kinds(world, seed=world)
    if world == 4:
        for model, optimizer in zip(models, optimizers, strict=True):
            train(model, optimizer, 2)
        checkpoint.save(saved, models, optimizers, threads=1)
    else:
        checkpoint.load_into(saved, models, optimizers, threads=1)
    found = {
        f"{number}/{name.removeprefix('module.')}": tensor
        for number, pair in enumerate(zip(models, optimizers, strict=True))
        for name, tensor in whole(*pair).items()
    }
    if world == 4:
        if rank == 0:
            torch.save(found, f"{directory}/expected.pt")
        equal = True
    else:
        equal = same(found, torch.load(f"{directory}/expected.pt"))
    leave()
    return equal


def test_plain_ddp_fsdp2_tensor_parallel_and_2d_models_are_one_checkpoint(tmp_path: Path) -> None:
    for world in (4, 2):
        assert all(run(mixed, world, str(tmp_path), timeout=120))
    expected = torch.load(tmp_path / "expected.pt")
    models = [Pair() for _ in range(5)]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    checkpoint.load_into(tmp_path / "a", models, optimizers)
    for number, pair in enumerate(zip(models, optimizers, strict=True)):
        for name, tensor in whole(*pair).items():
            assert torch.equal(tensor, expected[f"{number}/{name}"])


def failing(rank: int, world: int, store: str, directory: str, how: str) -> str:
    """One rank cannot save; all are told."""
    start(rank, world, store)
    model = nn.Linear(4, 4)
    checkpoint.save(f"{directory}/a", model, timeout=20, threads=1)
    others: Any = None
    if rank == 1 and how == "value":
        others = {"x": object()}
    if rank == 1 and how == "shape":
        model = nn.Linear(4, 5)
    if how == "space" and rank == 1:
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        model.weight.data = torch.zeros(400, 400)
    if how == "space" and rank != 1:
        model.weight.data = torch.zeros(400, 400)
    try:
        checkpoint.save(f"{directory}/a", model, others=others, timeout=20, threads=1)
    except (checkpoint.CheckpointError, OSError, TypeError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        leave()
    return "saved"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("value", "others/x is a builtins.object"),
        ("shape", "rank 1: StateMismatchError: names or shapes changed on rank 1"),
        ("space", "File too large"),
    ],
)
def test_an_error_of_one_rank_is_told_to_all_and_the_old_checkpoint_stays(
    how: str, words: str, tmp_path: Path
) -> None:
    found = run(failing, 2, str(tmp_path), how)
    assert words in found[0], found
    assert "rank 1" in found[0]
    assert found[1] != "saved"
    assert os.listdir(tmp_path) == ["a"]
    with CheckpointFiles(tmp_path / "a") as files:
        assert verify(files, 1) == []


def apart(rank: int, world: int, store: str, directory: str) -> list[Any]:
    """Give bad arguments on one rank, then save; and tie what is a rank's own."""
    start(rank, world, store)
    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    found: list[Any] = []

    def attempt(path: str, **options: Any) -> None:
        try:
            checkpoint.save(path, model, **{"timeout": 20, "threads": 1, **options})
        except Exception as error:
            found.append(str(error))

    bad = rank == 1
    attempt("" if bad else f"{directory}/a")
    attempt(f"{directory}/a", step="x" if bad else 1)
    attempt(f"{directory}/a", threads=-1 if bad else 1)
    with checkpoint.CheckpointManager(f"{directory}/m", threads=1, timeout=20) as manager:
        try:
            manager.save("x" if bad else 1, model)  # type: ignore[arg-type]
        except Exception as error:
            found.append(str(error))
        try:  # once more, at the boundary at which a rank that has begun learns of it
            while not manager.should_save(2):
                dist.barrier()
        except Exception as error:
            found.append(str(error))
        manager.save(2, model)
        manager.wait()
        found.append(manager.steps())
    average = torch.full((3,), float(rank))
    with torch.no_grad():
        model.bias.fill_(rank)
    own = {"one": average, "other": average, "bias": model.bias}
    attempt(f"{directory}/a", per_rank=own, step=7)
    dist.barrier()
    loaded = checkpoint.load_into(f"{directory}/a", model)
    for values in (loaded.per_rank, checkpoint.load(f"{directory}/a")["per_rank"]):
        found.append([values[name].tolist() for name in ("one", "other", "bias")])
    found.append(loaded.step)
    leave()
    return found


def test_a_rank_with_bad_arguments_stays_with_the_others_and_its_own_tensors_are_its_own(
    tmp_path: Path,
) -> None:
    words = ("path is empty", "step is 'x'", "threads is -1", "step is 'x'", "step is 'x'")
    for rank, found in enumerate(run(apart, 2, str(tmp_path), timeout=60)):
        for said, expected in zip(found[:5], words, strict=True):
            assert expected in said
            assert rank == 1 or "failed on rank 1" in said
        own = [[float(rank)] * 3] * 3
        assert found[5:] == [[2], own, own, 7]


def missing(rank: int, world: int, store: str, directory: str) -> str:
    start(rank, world, store)
    if rank == 1:
        time.sleep(4)
        return ""
    try:
        checkpoint.save(f"{directory}/a", nn.Linear(2, 2), timeout=1, threads=1)
    except checkpoint.CheckpointError as error:
        return str(error)
    return "saved"


def test_a_rank_that_does_not_come_is_named_within_the_timeout(tmp_path: Path) -> None:
    ended = Ranks(missing, 2, str(tmp_path)).join()
    assert "rank 1 did not come" in ended[0].value
    assert "within 1 s" in ended[0].value
    assert os.listdir(tmp_path) == []


def managed(rank: int, world: int, store: str, directory: str) -> Any:
    """An asynchronous save fails on rank 1; all ranks raise at the same step boundary."""
    start(rank, world, store)
    torch.manual_seed(0)
    training = Training()
    raised: Any = None
    manager = checkpoint.CheckpointManager(directory, every=2, keep=2, threads=1, timeout=20)
    for step in range(1, 200):
        training.steps(1)
        dist.barrier()  # stands for a step's all-reduce
        try:
            if manager.should_save(step):
                manager.wait()
                if step == 4 and rank == 1:
                    import resource

                    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
                manager.save(step, *training.parts())
        except (checkpoint.CheckpointError, OSError) as error:
            raised = (step, str(error))
            break
    steps = manager.steps()
    leave()
    return raised, steps


def test_a_background_error_is_raised_on_all_ranks_at_one_boundary(tmp_path: Path) -> None:
    (one, steps), (two, _) = run(managed, 2, str(tmp_path))
    assert one[0] == two[0], (one, two)
    assert one[0] > 4
    assert "rank 1" in one[1]
    assert "File too large" in one[1]
    assert "File too large" in two[1]
    assert steps == [2], "the checkpoint before is still there"
    assert sorted(os.listdir(tmp_path)) == ["step-00000002"]


def resuming(rank: int, world: int, store: str, directory: str) -> Any:
    start(rank, world, store)
    mesh = DeviceMesh("cpu", list(range(world)))
    model, optimizer = sharded(mesh, 0)
    manager = checkpoint.CheckpointManager(directory, minutes=1e-4, threads=1, timeout=20)
    saved = []
    for step in range(1, 40):
        train(model, optimizer, 1)
        time.sleep(0.001)
        if manager.should_save(step):
            manager.save(step, model, optimizer)
            saved.append(step)
    manager.close()
    if rank == 0:
        # Damage that only rank 1 reads: the end of its own shard.
        shard = Path(directory) / f"step-{saved[-1]:08d}" / "rank-00001.safetensors"
        index = json.loads(shard.with_suffix(".json").read_bytes())
        data = bytearray(shard.read_bytes())
        data[index["tensors"][0][5]] ^= 1
        shard.write_bytes(data)
    dist.barrier()
    fresh, optimizer = sharded(mesh, 3)
    manager = checkpoint.CheckpointManager(directory, threads=1, timeout=20)
    with pytest.warns(UserWarning, match="damaged") if rank < 2 else pytest.warns():
        loaded: Any = manager.resume(fresh, optimizer)
    leave()
    return saved, loaded.step


def test_ranks_decide_by_time_alike_and_fall_back_together(tmp_path: Path) -> None:
    found = run(resuming, 2, str(tmp_path))
    assert found[0] == found[1]
    saved, resumed = found[0]
    assert len(saved) >= 2
    assert resumed == saved[-2]


class Grown(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(layers))


def grown(mesh: DeviceMesh, layers: int) -> Any:
    model = Grown(layers)
    fully_shard(model, mesh=mesh)
    return model


def falling_back(rank: int, world: int, store: str, directory: str) -> Any:
    start(rank, world, store)
    mesh = DeviceMesh("cpu", list(range(world)))
    manager = checkpoint.CheckpointManager(directory, threads=1, timeout=20, asynchronous=False)
    for layers in (1, 2):
        manager.save(layers, grown(mesh, layers))
    if rank == 0:
        path = Path(directory) / "step-00000002"
        with CheckpointFiles(path) as files:
            ((index, piece),) = [
                found for found in files.slices()["model/layers.1.weight"] if found[0].rank == 1
            ]
        with open(path / index.file, "r+b") as file:
            file.seek(piece.begin)
            file.write(b"damage")
    dist.barrier()
    fresh = grown(mesh, 2)
    layer = fresh.layers[1]
    before = {name: tensor.to_local().clone() for name, tensor in layer.state_dict().items()}
    with pytest.warns(UserWarning, match="damaged"):
        loaded: Any = manager.resume(fresh, strict=False)
    after = {name: tensor.to_local() for name, tensor in layer.state_dict().items()}
    leave()
    return loaded.step, same(after, before)


def test_damage_that_one_rank_sees_leaves_no_values_on_any(tmp_path: Path) -> None:
    assert run(falling_back, 2, str(tmp_path)) == [(1, True), (1, True)]
