"""What HostAdamW refuses, in words: options, gradients and states that it would get wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

SHARED = ("lr", "betas", "eps", "weight_decay")
# Of torch.optim.AdamW; those that a state may bring only say how torch computes the same.
OPTIONS = ("amsgrad", "maximize", "differentiable", "capturable", "foreach", "fused")
HARMLESS_IN_A_STATE = ("foreach", "fused")
MOMENTS = ("exp_avg", "exp_avg_sq")


def check_options(options: Mapping[str, Any], of_state: bool = False) -> None:
    """Refuse options of torch.optim.AdamW that HostAdamW has not, unless they are off.

    Args:
        options: Arguments, a group, or the group of a state.
        of_state: The last: `foreach` and `fused` are passed over, as they change no result.

    Raises:
        ValueError: One is on.
    """
    for name in OPTIONS:
        if options.get(name) and not (of_state and name in HARMLESS_IN_A_STATE):
            raise ValueError(
                f"{name}={options[name]} was given: HostAdamW does not have it; leave it out, or "
                f"use torch.optim.AdamW"
            )
    if options.get("decoupled_weight_decay") is False:
        raise ValueError(
            "the state is of torch.optim.Adam, whose weight decay is not decoupled: HostAdamW "
            "takes states of torch.optim.AdamW"
        )


def check_values(values: Mapping[str, Any]) -> None:
    """Refuse learning rates and the like that torch.optim.AdamW refuses.

    Raises:
        ValueError: As torch's.
    """
    torch.optim.AdamW([torch.zeros(1)], **{name: values[name] for name in SHARED})


def check_state(
    state_dict: Any, groups: Sequence[Mapping[str, Any]], params: Sequence[Tensor]
) -> None:
    """Refuse a state that is not of these groups, before anything is taken from it.

    Args:
        state_dict: The state.
        groups: The optimizer's.
        params: All parameters, in the order of the groups.

    Raises:
        ValueError: It does not fit.
    """
    if not isinstance(state_dict, Mapping) or not {"state", "param_groups"} <= state_dict.keys():
        raise ValueError(
            'a state is a dictionary with "state" and "param_groups", as state_dict() returns'
        )
    theirs = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in theirs]
    if sizes != [len(group["params"]) for group in groups]:
        raise ValueError(
            f"the state has groups of {sizes} parameters, this optimizer of "
            f"{[len(group['params']) for group in groups]}"
        )
    for mine, other in zip(groups, theirs, strict=True):
        check_options(other, of_state=True)
        check_values({**mine, **other})
    numbers = [number for group in theirs for number in group["params"]]
    for number, param in zip(numbers, params, strict=True):
        held = state_dict["state"].get(number)
        if held:
            _check_held(number, held, param)


def _check_held(number: Any, held: Mapping[str, Any], param: Tensor) -> None:
    for name in ("step", *MOMENTS):
        if name not in held:
            raise ValueError(
                f"the state of parameter {number} has no {name!r}: it is of another optimizer"
            )
    if torch.as_tensor(held["step"]).numel() != 1:
        raise ValueError(f"the state of parameter {number} has a 'step' that is not one number")
    for name in (*MOMENTS, "master"):
        value = held.get(name, None)
        if name == "master" and value is None:
            continue
        if not isinstance(value, Tensor) or not value.is_floating_point():
            raise ValueError(f"{name!r} of parameter {number} is not a floating-point tensor")
        if value.shape != param.shape:
            raise ValueError(
                f"the state has a parameter of {tuple(value.shape)} where this optimizer has one "
                f"of {tuple(param.shape)} ({name!r} of parameter {number})"
            )
        if value.is_meta or value.layout != torch.strided:
            raise ValueError(f"{name!r} of parameter {number} has no dense values to take")


def problem_with(
    params: Sequence[Tensor], made: Mapping[int, tuple[torch.Size, torch.dtype]]
) -> str:
    """Return why these parameters cannot be stepped as they are, or "".

    Args:
        params: All.
        made: By id, shape and type of those that were trained when the optimizer was made.
    """
    for param in params:
        known = made.get(id(param))
        if known is None:
            if param.grad is not None:
                return (
                    f"a parameter of {tuple(param.shape)} has a gradient, but was frozen when "
                    f"HostAdamW was made: make a new HostAdamW after requires_grad_(True), or "
                    f"remove its .grad"
                )
            continue
        if known != (param.shape, param.dtype):
            return (
                f"a parameter of {tuple(known[0])}, {known[1]} has become one of "
                f"{tuple(param.shape)}, {param.dtype}: make a new HostAdamW after that"
            )
        if param.grad is not None and param.grad.layout != torch.strided:
            return (
                f"a gradient is {param.grad.layout}: HostAdamW takes dense ones "
                f"(nn.Embedding(sparse=False))"
            )
    return ""
