"""What HostAdamW would get wrong is refused in words."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from haiscale.adamw_checks import OPTIONS
from haiscale.host_adamw import HostAdamW


def weight(size: int = 3, **kwargs: Any) -> nn.Parameter:
    return nn.Parameter(torch.ones(size), **kwargs)


def plain_state(**options: Any) -> Any:
    param = weight()
    optimizer = torch.optim.AdamW([param], lr=0.1, **options)
    param.grad = torch.ones(3)
    optimizer.step()
    return optimizer.state_dict()


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_torchs_adamw_are_refused_as_arguments_and_in_groups(option: str) -> None:
    on: dict[str, Any] = {option: True}
    with pytest.raises(ValueError, match=f"{option}=True was given: HostAdamW does not have it"):
        HostAdamW([weight()], **on)
    with pytest.raises(ValueError, match=f"{option}=True was given: HostAdamW does not have it"):
        HostAdamW([{"params": [weight()], **on}])
    off: dict[str, Any] = {option: False}
    HostAdamW([weight()], **off)


def test_an_unknown_argument_and_a_bad_value_in_a_group_are_refused() -> None:
    with pytest.raises(TypeError, match="no argument 'momentum'"):
        HostAdamW([weight()], momentum=0.9)
    with pytest.raises(ValueError, match="Invalid learning rate: -1"):
        HostAdamW([{"params": [weight()], "lr": -1}])


@pytest.mark.parametrize("option", ["amsgrad", "maximize", "differentiable", "capturable"])
def test_a_state_of_another_algorithm_is_refused(option: str) -> None:
    state = plain_state()
    state["param_groups"][0][option] = True
    optimizer = HostAdamW([weight()], lr=0.5)
    with pytest.raises(ValueError, match=f"{option}=True"):
        optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_how_torch_computed_a_state_does_not_matter() -> None:
    optimizer = HostAdamW([weight()])
    optimizer.load_state_dict(plain_state(fused=True))
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "fused" not in optimizer.param_groups[0]
    assert float(optimizer.state_dict()["state"][0]["step"]) == 1


def damaged(name: str, value: Any) -> Any:
    state = plain_state()
    state["state"][0][name] = value
    return state


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "a state is a dictionary"),
        ({"state": {}}, "a state is a dictionary"),
        ({"state": {}, "param_groups": [3]}, "not such as state_dict"),
        (damaged("exp_avg", torch.ones(3, device="meta")), "no dense values"),
        (damaged("exp_avg_sq", torch.ones(4)), r"a parameter of \(4,\)"),
        (damaged("exp_avg_sq", None), "not a floating-point tensor"),
        (damaged("master", torch.ones(2)), r"a parameter of \(2,\)"),
        (damaged("step", torch.ones(2)), "not one number"),
        (torch.optim.Adam([weight()]).state_dict(), "of torch.optim.Adam"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        HostAdamW([weight()]).load_state_dict(state)


def test_a_parameter_unfrozen_later_is_refused_at_the_step() -> None:
    first, second = weight(), weight(requires_grad=False)
    optimizer = HostAdamW([first, second])
    second.requires_grad_(True)
    first.grad, second.grad = torch.ones(3), torch.ones(3)
    with pytest.raises(RuntimeError, match="was frozen when HostAdamW was made"):
        optimizer.step()
    assert torch.equal(first, torch.ones(3))


def test_a_parameter_of_another_type_than_it_was_is_refused_at_the_step() -> None:
    param = weight()
    optimizer = HostAdamW([param])
    param.data = param.data.half()
    with pytest.raises(RuntimeError, match=r"has become one of .*float16"):
        optimizer.step()


def test_sparse_gradients_are_refused() -> None:
    layer = nn.Embedding(10, 3, sparse=True)
    optimizer = HostAdamW(layer.parameters())
    layer(torch.tensor([1])).sum().backward()
    with pytest.raises(RuntimeError, match="takes dense ones"):
        optimizer.step()


def test_a_grad_scaler_is_refused_and_leaves_the_optimizer_as_it_was() -> None:
    param = weight()
    optimizer = HostAdamW([param])
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale((param * 2).sum()).backward()
    with pytest.raises(RuntimeError, match=r"GradScaler\.step was given a HostAdamW"):
        scaler.step(optimizer)
    assert torch.equal(param, torch.ones(3))
    optimizer.step()
    assert (param < 1).all()


def test_copies_and_pickles_are_refused() -> None:
    optimizer = HostAdamW([weight()])
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match="keep its state_dict"):
            copied(optimizer)
