"""`to_hfai` and `to_torch`: what the swap keeps, what it takes, what it leaves."""

from __future__ import annotations

import copy
import re
import warnings

import pytest
import torch
from torch import nn

import hfai
from hfai.nn import to_hfai, to_torch
from tests.nn.operator_cases import (
    Operator,
    OperatorCase,
    assert_close,
    assert_same_bits,
    run,
    weighted_sum,
)


@pytest.fixture
def layer(case: OperatorCase) -> nn.Module:
    """The case's layer, of torch's class."""
    return Operator(case, "torch").build()


def test_the_swap_changes_the_class_and_nothing_else(case: OperatorCase, layer: nn.Module) -> None:
    layer.eval()
    layer.note = "the user's own attribute"
    before = dict(vars(layer))
    assert to_hfai(layer) is layer
    assert type(layer) is case.hfai_class
    assert isinstance(layer, case.torch_class)
    assert list(vars(layer)) == list(before)
    assert all(vars(layer)[key] is value for key, value in before.items())
    assert to_torch(layer) is layer
    assert type(layer) is case.torch_class
    assert all(vars(layer)[key] is value for key, value in before.items())


def test_parameters_stay_the_same_objects_in_the_same_order(layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 3), layer, nn.Linear(3, 3))
    first = next(layer.parameters())
    first.requires_grad_(False)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    before = [(name, p, p.data_ptr(), p.grad) for name, p in model.named_parameters()]
    for convert in (to_hfai, to_torch):
        convert(model)
        after = [(name, p, p.data_ptr(), p.grad) for name, p in model.named_parameters()]
        assert all(
            old[0] == new[0] and old[1] is new[1] and old[2] == new[2] and old[3] is new[3]
            for old, new in zip(before, after, strict=True)
        )
    assert not first.requires_grad


def test_an_optimizer_goes_on_as_if_nothing_had_happened(
    case: OperatorCase, device: torch.device
) -> None:
    torchs = Operator(case, "torch")
    trained = []
    for swap_after in (None, 2):
        layer = torchs.build(device)
        # With this epsilon a gradient that is rounding alone (of keys' biases) moves little.
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01, eps=0.01)
        for step in range(4):
            if step == swap_after:
                to_hfai(layer)
            optimizer.zero_grad()
            weighted_sum(layer(*torchs.inputs(device, seed=step))).backward()
            optimizer.step()
        assert optimizer.state[next(layer.parameters())]["step"] == 4
        trained.append([parameter.detach() for parameter in layer.parameters()])
    assert_close(trained[1], trained[0], case, torch.float32)
    if device.type == "cpu":
        assert_same_bits(trained[1], trained[0])


def test_a_layer_that_is_the_whole_model_is_swapped(case: OperatorCase, layer: nn.Module) -> None:
    assert type(to_hfai(layer)) is case.hfai_class


def test_layers_are_found_however_deep_they_lie(case: OperatorCase, layer: nn.Module) -> None:
    model = nn.ModuleDict({"a": nn.ModuleList([nn.Sequential(nn.Identity(), layer)])})
    to_hfai(model)
    assert type(layer) is case.hfai_class
    assert model["a"][0][1] is layer


@pytest.mark.needs("no layers inside")
def test_a_layer_used_in_several_places_stays_one_layer(
    case: OperatorCase, layer: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Module()
    model.first, model.second = layer, layer
    model.listed = nn.ModuleList([layer, layer])
    keys = list(model.state_dict())
    to_hfai(model, verbose=True)
    assert f"swapped 1 {case.torch_class.__name__}\n" in capsys.readouterr().out
    assert model.first is model.second is model.listed[0] is model.listed[1] is layer
    assert type(layer) is case.hfai_class
    assert list(model.state_dict()) == keys


def test_parameters_tied_between_layers_stay_tied(case: OperatorCase, layer: nn.Module) -> None:
    other = copy.deepcopy(layer)
    name, parameter = next(layer.named_parameters())
    owner = other.get_submodule(name.rpartition(".")[0])
    setattr(owner, name.rpartition(".")[2], parameter)
    model = nn.ModuleList([layer, other])
    for convert in (to_hfai, to_torch):
        convert(model)
        assert dict(other.named_parameters())[name] is parameter
        assert dict(layer.named_parameters())[name] is parameter
    assert type(other) is case.torch_class


def test_converting_twice_is_converting_once(case: OperatorCase, layer: nn.Module) -> None:
    to_hfai(to_hfai(layer))
    assert type(layer) is case.hfai_class
    to_torch(to_torch(layer))
    assert type(layer) is case.torch_class


def test_to_torch_leaves_a_model_alone_that_was_never_converted(
    case: OperatorCase, layer: nn.Module
) -> None:
    model = nn.Sequential(layer, nn.Linear(3, 3))
    classes = [type(module) for module in model.modules()]
    before = [dict(vars(module)) for module in model.modules()]
    storages = [p.data_ptr() for p in model.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_torch(model) is model
    assert [type(module) for module in model.modules()] == classes
    assert [p.data_ptr() for p in model.parameters()] == storages
    for module, attributes in zip(model.modules(), before, strict=True):
        assert vars(module).keys() == attributes.keys()


def test_there_and_back_computes_what_it_computed_before(
    case: OperatorCase, device: torch.device
) -> None:
    torchs = Operator(case, "torch")
    layer = torchs.build(device)
    before = run(layer, torchs.inputs(device))
    assert_same_bits(run(to_torch(to_hfai(layer)), torchs.inputs(device)), before)


def test_a_subclass_of_torchs_class_is_left_alone(case: OperatorCase, layer: nn.Module) -> None:
    mine = type("Mine", (case.torch_class,), {})
    layer.__class__ = mine
    to_hfai(layer)
    assert type(layer) is mine
    to_torch(layer)
    assert type(layer) is mine


def test_a_users_subclass_of_ours_is_left_alone_and_to_torch_names_it(
    case: OperatorCase, layer: nn.Module
) -> None:
    mine = type("Mine", (case.hfai_class,), {})
    layer.__class__ = mine
    model = nn.Sequential(layer)
    to_hfai(model)
    with pytest.warns(UserWarning, match=re.escape("to_torch left 0 (Mine)")):
        to_torch(model)
    assert type(layer) is mine


def test_inplace_false_converts_a_deep_copy(case: OperatorCase, layer: nn.Module) -> None:
    converted = to_hfai(layer, inplace=False)
    assert type(layer) is case.torch_class
    assert type(converted) is case.hfai_class
    ours = dict(converted.named_parameters())
    for name, parameter in layer.named_parameters():
        assert ours[name] is not parameter
        assert ours[name].data_ptr() != parameter.data_ptr()
        assert torch.equal(ours[name], parameter)


def test_another_model_is_not_touched(case: OperatorCase, layer: nn.Module) -> None:
    bystander = copy.deepcopy(layer)
    to_hfai(layer)
    assert type(bystander) is case.torch_class
    assert type(case.torch_class(*case.arguments, **case.keywords)) is case.torch_class


@pytest.mark.needs("no layers inside")
def test_verbose_says_what_was_swapped_and_what_was_left_and_why(
    case: OperatorCase, layer: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = copy.deepcopy(layer)
    mine.__class__ = type("Mine", (case.torch_class,), {"__module__": "user"})
    model = nn.ModuleDict({"a": layer, "b": mine, "c": nn.Linear(2, 2)})
    to_hfai(model, verbose=True)
    lines = capsys.readouterr().out.splitlines()
    name = case.torch_class.__name__
    assert lines == [
        f"to_hfai: swapped 1 {name}",
        f"  left b: user.Mine is a subclass of {name}; only torch's exact class is swapped",
    ]


def test_verbose_says_that_there_was_nothing_to_swap(capsys: pytest.CaptureFixture[str]) -> None:
    to_hfai(nn.Linear(2, 2), verbose=True)
    assert capsys.readouterr().out == "to_hfai: swapped nothing\n"


def test_conversion_prints_nothing_unless_asked(
    layer: nn.Module, capsys: pytest.CaptureFixture[str]
) -> None:
    to_torch(to_hfai(layer))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("function", [to_hfai, to_torch, hfai.explain])
@pytest.mark.parametrize("given", [nn.Linear, lambda x: x, {"weight": torch.ones(1)}])
def test_what_is_not_a_module_is_refused_in_words(function: object, given: object) -> None:
    with pytest.raises(TypeError, match=r"takes a torch\.nn\.Module, not (type|function|dict)"):
        function(given)  # type: ignore[operator]
