"""Loading into a training: it goes on bit for bit, or says what does not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hfai import checkpoint
from tests.checkpoint.training import Model, Training, same


def test_a_resumed_training_has_the_losses_of_the_unbroken_one(tmp_path: Path) -> None:
    training = Training()
    training.steps(3)
    checkpoint.save(tmp_path / "a", *training.parts(), others={"epoch": 1}, step=3)
    expected = training.steps(4)
    other = Training(seed=5)
    other.steps(1)
    loaded = checkpoint.load_into(tmp_path / "a", *other.parts(), rng=True)
    assert other.model.head.weight is other.model.embedding.weight
    assert other.steps(4) == expected
    assert same(other.tensors(), training.tensors())
    assert (loaded.step, loaded.others) == (3, {"epoch": 1})


def test_an_optimizer_that_has_not_stepped_gets_its_state(tmp_path: Path) -> None:
    training, fresh = Training(), Training(seed=3)
    training.steps(2)
    checkpoint.save(tmp_path / "a", *training.parts())
    checkpoint.load_into(tmp_path / "a", *fresh.parts())
    assert same(fresh.tensors(), training.tensors())
    step = fresh.optimizer.state[fresh.model.inner.weight]["step"]
    assert step.device.type == "cpu"


def test_states_of_another_type_than_the_parameter_are_not_cast(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Linear(4, 4).to(torch.bfloat16)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    for parameter in model.parameters():
        optimizer.state[parameter] = {"step": torch.tensor(1.0), "exp_avg": torch.randn(
            parameter.shape), "exp_avg_sq": torch.rand(parameter.shape)}  # fmt: skip
    checkpoint.save(tmp_path / "a", model, optimizer)
    other, loaded = make()
    checkpoint.load_into(tmp_path / "a", other, loaded)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert loaded.state[two]["exp_avg"].dtype == torch.float32
        assert torch.equal(loaded.state[two]["exp_avg"], optimizer.state[one]["exp_avg"])


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        lambda p: torch.optim.Adam(p, lr=torch.tensor(0.1), amsgrad=True),
        lambda p: torch.optim.Adafactor(p),
        lambda p: torch.optim.LBFGS(p, history_size=3, max_iter=2),
        lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
    ],
    ids=["SGD", "momentum", "amsgrad", "Adafactor", "LBFGS", "RMSprop"],
)
def test_optimizers_go_on_as_if_nothing_had_been(make: Any, tmp_path: Path) -> None:
    def begin(seed: int) -> tuple[nn.Module, Any]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        return model, make(list(model.parameters()))

    def steps(model: nn.Module, optimizer: Any, count: int) -> list[float]:
        data = torch.linspace(-1, 1, 24).reshape(4, 6)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(data) - 1).square().mean()
            loss.backward()
            return loss

        return [float(optimizer.step(closure).detach()) for _ in range(count)]

    model, optimizer = begin(0)
    steps(model, optimizer, 3)
    checkpoint.save(tmp_path / "a", model, optimizer)
    other, loaded = begin(1)
    checkpoint.load_into(tmp_path / "a", other, loaded)
    assert steps(other, loaded, 3) == steps(model, optimizer, 3)


def test_names_do_not_depend_on_wrappers(tmp_path: Path) -> None:
    compiled: Any = torch.compile(Model(), backend="eager")
    checkpoint.save(tmp_path / "a", compiled, rng=False)
    plain = Model()
    checkpoint.load_into(tmp_path / "a", plain)
    assert torch.equal(plain.inner.weight, compiled.inner.weight)
    parallel = nn.DataParallel(Model()).cpu()  # it goes to a GPU by itself
    checkpoint.load_into(tmp_path / "a", parallel)
    assert torch.equal(parallel.module.inner.weight, plain.inner.weight)


def test_a_model_on_the_meta_device_is_made_and_stays_tied(tmp_path: Path) -> None:
    training = Training()
    checkpoint.save(tmp_path / "a", training.model, rng=False)
    with torch.device("meta"):
        model = Model()
    checkpoint.load_into(tmp_path / "a", model)
    assert same(model.state_dict(), training.model.state_dict())
    assert model.head.weight is model.embedding.weight
    assert isinstance(model.inner.weight, nn.Parameter)


class WithExtras(nn.Module):
    """Has what a state dict has besides tensors, and a hook that gives no memory of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.seen: Any = None
        self.register_state_dict_post_hook(self._double)
        self.register_load_state_dict_pre_hook(self._halve)

    def get_extra_state(self) -> Any:
        return {"seen": self.seen, "more": torch.arange(2)}

    def set_extra_state(self, state: Any) -> None:
        self.seen = state["seen"]

    @staticmethod
    def _double(module: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
        state[prefix + "weight"] = state[prefix + "weight"] * 2

    @staticmethod
    def _halve(module: Any, state: dict[str, Any], prefix: str, *rest: Any) -> None:
        if prefix + "weight" in state:
            state[prefix + "weight"] = state[prefix + "weight"] / 2


def test_extra_state_and_state_dict_hooks_are_obeyed(tmp_path: Path) -> None:
    model = nn.Sequential(WithExtras())
    model[0].seen = ("a", 1)
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([1.0, 2.0, 3.0]))
    checkpoint.save(tmp_path / "a", model)
    assert checkpoint.load(tmp_path / "a")["model"]["0.weight"].tolist() == [2, 4, 6]
    other = nn.Sequential(WithExtras())
    checkpoint.load_into(tmp_path / "a", other)
    assert other[0].weight.tolist() == [1, 2, 3]
    assert other[0].seen == ("a", 1)


class TestMismatches:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        checkpoint.save(tmp_path / "a", nn.Linear(4, 3), rng=False)
        return tmp_path / "a"

    @pytest.mark.parametrize(
        ("model", "words"),
        [
            (nn.Linear(4, 5), r"model/weight is 5×4, saved 3×4"),
            (nn.Linear(4, 3).double(), r"model/weight is float64, saved float32 \(cast=True"),
            (nn.Linear(4, 3, bias=False), r"only in the checkpoint: model/bias \(strict=False"),
            (nn.Bilinear(4, 4, 3), r"model/weight is 3×4×4"),
            (nn.Sequential(nn.Linear(4, 3)), r"not in the checkpoint: model/0.weight"),
            ([nn.Linear(4, 3)], r"1 model\(s\), and 1 were given in a list"),
        ],
    )
    def test_it_is_refused_with_name_and_both_sides(
        self, model: Any, words: str, path: Path
    ) -> None:
        with pytest.raises(checkpoint.StateMismatchError, match=words):
            checkpoint.load_into(path, model)

    def test_types_are_converted_when_asked(self, path: Path) -> None:
        saved = checkpoint.load(path)["model"]["weight"]
        model = nn.Linear(4, 3).double()
        checkpoint.load_into(path, model, cast=True)
        assert torch.equal(model.weight, saved.double())

    def test_not_strict_reports_what_was_left_out(self, path: Path) -> None:
        model = nn.Linear(4, 3, bias=False)
        model.register_buffer("other", torch.ones(2))
        loaded = checkpoint.load_into(path, model, strict=False)
        assert loaded.missing == ("model/other",)
        assert loaded.unexpected == ("model/bias",)
        assert torch.equal(model.weight, checkpoint.load(path)["model"]["weight"])

    def test_an_optimizer_or_scheduler_that_was_not_saved_is_named(self, path: Path) -> None:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters())
        with pytest.raises(checkpoint.StateMismatchError, match=r"0 optimizer\(s\), and 1"):
            checkpoint.load_into(path, model, optimizer)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        with pytest.raises(checkpoint.StateMismatchError, match="not in the checkpoint: scheduler"):
            checkpoint.load_into(path, model, scheduler=scheduler)


def test_several_models_and_optimizers_are_kept_apart(tmp_path: Path) -> None:
    def make() -> tuple[list[nn.Module], list[torch.optim.Optimizer]]:
        models: list[nn.Module] = [nn.Linear(3, 3), nn.Linear(3, 3)]
        optimizers: list[Any] = [torch.optim.Adam(m.parameters()) for m in models]
        for model, optimizer in zip(models, optimizers, strict=True):
            model(torch.ones(3)).sum().backward()
            optimizer.step()
        return models, optimizers

    models, optimizers = make()
    checkpoint.save(tmp_path / "a", models, optimizers)
    others, loaded = make()
    checkpoint.load_into(tmp_path / "a", others, loaded)
    for one, two in zip(models, others, strict=True):
        assert same(one.state_dict(), two.state_dict())


def test_what_is_no_checkpoint_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(checkpoint.NoCheckpointError, match="no checkpoint at"):
        checkpoint.load(tmp_path / "none")
    torch.save({}, tmp_path / "file.pt")
    with pytest.raises(checkpoint.NoCheckpointError):
        checkpoint.load(tmp_path / "file.pt")
    checkpoint.save(tmp_path / "many" / "step-00000001", {"w": torch.ones(1)})
    with pytest.raises(checkpoint.NoCheckpointError, match="directory of checkpoints: name one"):
        checkpoint.load(tmp_path / "many")


def test_models_tied_at_the_save_and_not_at_the_load_are_all_filled(tmp_path: Path) -> None:
    def make() -> list[nn.Module]:
        return [nn.Sequential(*[nn.Linear(4, 4, bias=at % 2 == 0) for at in range(12)])
                for _ in range(2)]  # fmt: skip

    for _ in range(5):  # what a temporary's id was may be the next one's
        tied, loose = make(), make()
        for one, two in zip(*tied, strict=True):
            two.weight = one.weight
        checkpoint.save(tmp_path / "a", tied, rng=False)
        checkpoint.load_into(tmp_path / "a", loose)
        for one, two in zip(tied, loose, strict=True):
            assert same(one.state_dict(), two.state_dict())


def test_of_a_tensor_tied_here_and_not_there_the_last_name_counts(tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "a", {"x": torch.ones(3), "y": torch.full((3,), 2.0)})
    shared = torch.zeros(3)
    checkpoint.load_into(tmp_path / "a", {"x": shared, "y": shared})
    assert shared.tolist() == [2, 2, 2]
    double = torch.zeros(3, dtype=torch.float64)
    checkpoint.load_into(tmp_path / "a", {"x": double, "y": double}, cast=True)
    assert double.tolist() == [2, 2, 2]


class Rotary(nn.Module):
    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
        self.register_buffer("angles", torch.arange(4.0), persistent=False)


def test_what_no_checkpoint_fills_is_not_made_from_the_meta_device(tmp_path: Path) -> None:
    model = Rotary()
    checkpoint.save(tmp_path / "a", model, rng=False)
    with torch.device("meta"):
        empty, larger = Rotary(), Rotary(layers=2)
    with pytest.raises(checkpoint.StateMismatchError, match=r"meta device .*: model/angles: give"):
        checkpoint.load_into(tmp_path / "a", empty)
    assert all(t.is_meta for t in (*empty.parameters(), *empty.buffers())), "as it was"
    empty.angles = torch.arange(4.0)
    checkpoint.load_into(tmp_path / "a", empty)
    assert same(empty.state_dict(), model.state_dict())
    larger.angles = torch.arange(4.0)
    with pytest.raises(checkpoint.StateMismatchError, match=r"meta device .*layers.1.weight"):
        checkpoint.load_into(tmp_path / "a", larger, strict=False)
    with pytest.raises(checkpoint.StateMismatchError, match="has no memory"):
        checkpoint.load_into(tmp_path / "a", {"layers.0.weight": torch.empty(4, 4, device="meta")})


def test_values_of_a_state_dict_are_put_in_their_place(tmp_path: Path) -> None:
    inner = torch.zeros(2)
    saved = {"w": torch.ones(2), "n": 7, "in": {"x": 5, "t": torch.ones(2)}, 3: (1, "a")}
    checkpoint.save(tmp_path / "a", saved)
    state: dict[Any, Any] = {"w": torch.zeros(2), "n": 0, "in": {"x": 0, "t": inner}, 3: None}
    loaded = checkpoint.load_into(tmp_path / "a", state)
    assert (state["n"], state["in"]["x"], state[3]) == (7, 5, (1, "a"))
    assert state["in"]["t"] is inner
    assert (state["w"].tolist(), inner.tolist()) == ([1, 1], [1, 1])
    assert (loaded.missing, loaded.unexpected) == ((), ())
    del state["n"]
    with pytest.raises(checkpoint.StateMismatchError, match="only in the checkpoint: model/n"):
        checkpoint.load_into(tmp_path / "a", state)
    state["m"] = 1
    with pytest.raises(checkpoint.StateMismatchError, match="not in the checkpoint: model/m"):
        checkpoint.load_into(tmp_path / "a", state)
    assert state["m"] == 1


def test_the_state_of_a_parameter_of_any_name_is_found(tmp_path: Path) -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.ParameterDict({"$w": nn.Parameter(torch.ones(3))})
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = make()
    model["$w"].sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path / "a", model, optimizer)
    other, loaded = make()
    checkpoint.load_into(tmp_path / "a", other, loaded)
    assert torch.equal(loaded.state[other["$w"]]["exp_avg"],
                       optimizer.state[model["$w"]]["exp_avg"])  # fmt: skip


def test_a_tied_tensor_is_read_by_any_of_its_names(tmp_path: Path) -> None:
    training = Training()
    checkpoint.save(tmp_path / "a", training.model, rng=False)
    for name in ("embedding.weight", "head.weight"):
        wanted = f"model/{name}"
        found = checkpoint.load(tmp_path / "a", tensors=wanted.__eq__)["model"]
        assert torch.equal(found[name], training.model.head.weight)
        assert found["inner.weight"].is_meta


class WithViews(nn.Module):
    """Has buffers that share memory, with each other and with a parameter, and are not one."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3)
        buffer = torch.arange(4.0)
        self.register_buffer("one", buffer)
        self.register_buffer("other", buffer.detach())
        self.register_buffer("weight", self.inner.weight.detach())
        self.register_buffer("apart", torch.arange(4.0))


def test_buffers_that_share_memory_do_so_when_made_from_the_meta_device(tmp_path: Path) -> None:
    saved = WithViews()
    checkpoint.save(tmp_path / "a", saved, rng=False)
    with torch.device("meta"):
        model = WithViews()
    checkpoint.load_into(tmp_path / "a", model)
    assert same(model.state_dict(), saved.state_dict())
    assert model.get_buffer("one").data_ptr() == model.get_buffer("other").data_ptr()
    assert model.get_buffer("weight").data_ptr() == model.inner.weight.data_ptr()
    assert model.get_buffer("apart").data_ptr() != model.get_buffer("one").data_ptr()
    assert isinstance(model.inner.weight, nn.Parameter)
    assert model.inner.weight.requires_grad
    assert not isinstance(model.get_buffer("weight"), nn.Parameter)
