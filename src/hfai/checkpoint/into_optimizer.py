"""The tensors of an optimizer's state as places that a checkpoint is read into."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hfai.checkpoint import state, tree
from hfai.checkpoint.errors import StateMismatchError
from hfai.checkpoint.into import Act, Places, listed


def fill_optimizer(
    optimizer: Any, model: Any, values: Mapping[str, Any], places: Places
) -> list[Act]:
    """Ask for all tensors of an optimizer's state, or of several.

    Returns:
        What to do once they are read.

    Raises:
        StateMismatchError: The checkpoint has no optimizer, another number, or other groups.
    """
    optimizers = state.as_list(optimizer, "optimizer") or []
    saved = values.get("optimizer")
    if saved is None or len(saved) != len(optimizers):
        raise StateMismatchError(
            f"the checkpoint has {len(saved or [])} optimizer(s), and {len(optimizers)} were given"
        )
    names = state.all_names(state.as_list(model, "model") or [], model)
    acts = []
    for one, label, encoded in zip(
        optimizers, state.labels("optimizer", optimizer, optimizers), saved, strict=True
    ):
        acts.append(_fill_optimizer(one, label, names, encoded, places))
    return acts


def _fill_optimizer(
    optimizer: torch.optim.Optimizer,
    label: str,
    names: Mapping[Tensor, str],
    encoded: Mapping[str, Any],
    places: Places,
) -> Act:
    if "dict" in encoded:
        raise StateMismatchError(
            "the checkpoint's optimizer was saved as a state dict: take it from "
            "hfai.checkpoint.load(path)['optimizer'] and call load_state_dict"
        )
    known = dict(state.optimizer_names(optimizer, names))
    wanted = tree.members(encoded["state"])
    places_of: dict[Tensor, Any] = {}
    for parameter, name in known.items():
        if name not in wanted:
            continue
        places_of[parameter] = wanted[name]
        current = optimizer.state.get(parameter, {})
        for key, item in wanted[name].items() if isinstance(wanted[name], dict) else ():
            if isinstance(item, dict) and "$tensor" in item:
                _place_state(item["$tensor"], key, current.get(key), parameter, optimizer, places)
            else:
                for inner in tree.names_in(item):
                    places.make(inner, parameter.device)
    groups = _groups(optimizer, known, encoded["groups"])
    for group in groups:
        for inner in tree.names_in(group["options"]):
            places.make(inner)

    def act(fetch: tree.Fetch) -> None:
        numbers = {p: n for n, p in enumerate(known)}
        loaded = {p: tree.decode(item, fetch) for p, item in places_of.items()}
        content = {
            "state": {numbers[p]: item for p, item in loaded.items()},
            "param_groups": [
                {
                    **tree.decode(group["options"], fetch),
                    "params": [numbers[p] for p in ours["params"]],
                }
                for group, ours in zip(groups, optimizer.param_groups, strict=True)
            ],
        }
        optimizer.load_state_dict(content)
        # torch casts states to the parameter's type; what was saved is what goes on.
        for parameter, item in loaded.items():
            for key, value in item.items():
                found = optimizer.state[parameter].get(key)
                both = isinstance(value, Tensor) and isinstance(found, Tensor)
                if both and found.dtype != value.dtype:
                    optimizer.state[parameter][key] = value.to(found.device)

    return act


def _place_state(
    name: str,
    key: str,
    current: Any,
    parameter: Tensor,
    optimizer: torch.optim.Optimizer,
    places: Places,
) -> None:
    """Ask for one tensor of a parameter's state: where it is, or in a new one like it."""
    info = places.info(name)
    if info is None:
        places.lacks(name)
        return
    dtype = getattr(torch, info.dtype)
    fits = isinstance(current, Tensor) and not current.is_meta
    if fits and tuple(current.shape) == info.shape and current.dtype == dtype:
        place = current.detach()
    elif tuple(parameter.shape) == info.shape and parameter.ndim:
        place = torch.empty_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
        place = place.detach()
    else:
        places.make(name, _device_of(key, parameter, optimizer))
        return
    places.fill(name, place)
    places.keep(name, place)


def _device_of(key: str, parameter: Tensor, optimizer: torch.optim.Optimizer) -> torch.device:
    """Return where torch keeps a state: counts of steps on the CPU, unless kernels read them."""
    group = next(
        (g for g in optimizer.param_groups if any(p is parameter for p in g["params"])), {}
    )
    on_cpu = key == "step" and not (group.get("capturable") or group.get("fused"))
    return torch.device("cpu") if on_cpu else parameter.device


def _groups(
    optimizer: torch.optim.Optimizer, known: Mapping[Tensor, str], saved: list[Any]
) -> list[Any]:
    """Return, for each parameter group, the saved one whose options it takes.

    Raises:
        StateMismatchError: The groups have other parameters.
    """
    if len(saved) != len(optimizer.param_groups):
        raise StateMismatchError(
            f"the optimizer has {len(optimizer.param_groups)} parameter groups, the checkpoint "
            f"{len(saved)}"
        )
    for at, (ours, theirs) in enumerate(zip(optimizer.param_groups, saved, strict=True)):
        lost = [known[p] for p in ours["params"] if known[p] not in set(theirs["params"])]
        if lost:
            raise StateMismatchError(
                f"parameter group {at} of the checkpoint does not have {listed(lost)}"
            )
    return saved
