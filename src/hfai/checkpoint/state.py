"""What a training is made of, as named tensors and values, and back.

    model/NAME                the model's state dict; wrappers' prefixes are left out of names
    optimizer/state/NAME/KEY  the optimizer's state, by the name of the parameter it belongs to
    optimizer/groups          its parameter groups, parameters by name
    scheduler, scaler         their state dicts
    others                    the user's
    rank                      what differs between ranks: random number generators, the user's

Several models, or several optimizers, have their number after the first part: model/0/NAME.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfai.checkpoint import rng, tree
from hfai.checkpoint.errors import StateMismatchError

RESERVED = ("model", "optimizer", "scheduler", "scaler", "rng", "per_rank")
# What DDP, torch.compile and torch's wrappers for activation checkpoints put into names.
_WRAPPERS = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\."
)


class Captured(NamedTuple):
    """A training's state.

    Attributes:
        values: Encoded; the same on all ranks that hold the same names.
        own: Encoded values of this rank alone.
        tensors: All tensors by name, several names of one tensor among them.
        primary: Names of tensors of which one rank's values count.
        loose: Names of tensors of models and optimizers that other things than an optimizer's step
            may change.
    """

    values: dict[str, Any]
    own: dict[str, Any]
    tensors: dict[str, Tensor]
    primary: frozenset[str]
    loose: frozenset[str]


def clean_name(name: str, wrapped: bool) -> str:
    """Return a tensor's name without what wrappers add to it."""
    name = _WRAPPERS.sub("", name)
    return name.removeprefix("module.") if wrapped else name


def is_wrapped(model: nn.Module) -> bool:
    """Whether a model is torch's DataParallel or DistributedDataParallel, or compiled from one."""
    inner = getattr(model, "_orig_mod", model)
    kinds = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return isinstance(inner, kinds)


def names_of(model: nn.Module) -> dict[Tensor, str]:
    """Return the name of each parameter in a checkpoint."""
    wrapped = is_wrapped(model)
    return {
        parameter: clean_name(name, wrapped)
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def named_state(model: nn.Module) -> dict[str, tuple[str, Any]]:
    """Return a model's state dict by checkpoint names, with the names it has there.

    Raises:
        StateMismatchError: Two of its names are one without what wrappers add.
        TypeError: The model is FSDP1.
    """
    if any(hasattr(module, "_fsdp_wrapped_module") for module in model.modules()):
        raise TypeError(
            "FSDP1's flat parameters are not stored: shard the model by "
            "torch.distributed.fsdp.fully_shard (FSDP2)"
        )
    wrapped = is_wrapped(model)
    found: dict[str, tuple[str, Any]] = {}
    for name, value in model.state_dict().items():
        clean = clean_name(name, wrapped)
        if clean in found:
            raise StateMismatchError(
                f"{name} and {found[clean][0]} of the model would both be named {clean}"
            )
        found[clean] = (name, value)
    return found


def capture(
    model: Any,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    others: Mapping[str, Any] | None,
    per_rank: Mapping[str, Any] | None,
    with_rng: bool,
    rank: int,
) -> Captured:
    """Take the state of a training; tensors are referred to, not copied.

    Raises:
        TypeError: Something is no value that can be stored.
        ValueError: A name of `others` is reserved; an optimizer has parameters of no model.
        StateMismatchError: Names are not unique.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Any] = {}
    buffers: set[str] = set()
    models = as_list(model, "model")
    if models is not None:
        values["model"] = [
            _capture_model(one, label, tensors, buffers)
            for one, label in zip(models, labels("model", model, models), strict=True)
        ]
        values["models"] = _is_several(model)
    optimizers = as_list(optimizer, "optimizer")
    if optimizers is not None:
        parameters = all_names(models or [], model)
        values["optimizer"] = [
            _capture_optimizer(one, label, parameters, tensors)
            for one, label in zip(
                optimizers, labels("optimizer", optimizer, optimizers), strict=True
            )
        ]
        values["optimizers"] = _is_several(optimizer)
    before = set(tensors)
    for name, part in (("scheduler", scheduler), ("scaler", scaler)):
        if part is not None:
            state = part if isinstance(part, Mapping) else part.state_dict()
            values[name] = tree.encode(dict(state), name, tensors)
    _check_others(others)
    values["others"] = tree.encode(dict(others or {}), "others", tensors)
    primary = buffers | (set(tensors) - before)
    own = {}
    if per_rank is not None:
        own["per_rank"] = tree.encode(dict(per_rank), f"rank/{rank}/per_rank", tensors)
    if with_rng:
        own["rng"] = tree.encode(rng.capture(), f"rank/{rank}/rng", tensors)
    loose = frozenset(primary | _changeable(models or [], model, tensors))
    return Captured(values, own, tensors, frozenset(primary), loose)


_OPTIONS = re.compile(r"optimizer/(?:\d+/)?groups/")


def _changeable(models: Sequence[Any], given: Any, tensors: Mapping[str, Tensor]) -> set[str]:
    """Return names of an optimizer's options, and of what plain state dicts hold."""
    names = labels("model", given, models) if models else []
    plain = tuple(
        f"{label}/"
        for one, label in zip(models, names, strict=True)
        if not isinstance(one, nn.Module)
    )
    return {name for name in tensors if name.startswith(plain) or _OPTIONS.match(name)}


def _check_others(others: Mapping[str, Any] | None) -> None:
    if others is None:
        return
    if not isinstance(others, Mapping):
        raise TypeError(f"others is a {type(others).__name__}: give a dict")
    for name in RESERVED:
        if name in others:
            raise ValueError(
                f"others has the name {name!r}, which is the checkpoint's own: rename it "
                f"(taken: {', '.join(RESERVED)})"
            )


def _is_several(given: Any) -> bool:
    return isinstance(given, (list, tuple))


def as_list(given: Any, what: str) -> list[Any] | None:
    """Return one or several models or optimizers as a list; None where none was given."""
    if given is None:
        return None
    if _is_several(given):
        if not given:
            raise ValueError(f"{what} is an empty list: give at least one, or None")
        return list(given)
    return [given]


def labels(what: str, given: Any, items: Sequence[Any]) -> list[str]:
    """Return what the names of each one's tensors begin with."""
    return [f"{what}/{at}" for at in range(len(items))] if _is_several(given) else [what]


def all_names(models: Sequence[Any], given: Any) -> dict[Tensor, str]:
    """Return the checkpoint's name of each parameter of all models."""
    found: dict[Tensor, str] = {}
    for number, one in enumerate(models):
        if isinstance(one, nn.Module):
            lead = f"{number}." if _is_several(given) else ""
            for parameter, name in names_of(one).items():
                found.setdefault(parameter, lead + name)
    return found


def _capture_model(
    model: Any, label: str, tensors: dict[str, Tensor], buffers: set[str]
) -> dict[str, Any]:
    """Return a model's values; its tensors are added."""
    if isinstance(model, nn.Module):
        state = {name: value for name, (_, value) in named_state(model).items()}
        parameters = set(names_of(model).values())
    elif isinstance(model, Mapping):
        state, parameters = dict(model), set(model)
    else:
        raise TypeError(
            f"the model is a {type(model).__name__}: give a torch.nn.Module, a state dict, "
            "or a list of them"
        )
    for name, value in state.items():
        if isinstance(value, Tensor) and name not in parameters:
            buffers.add(f"{label}/{name}")
    encoded: dict[str, Any] = tree.encode(state, label, tensors)
    return encoded


def _capture_optimizer(
    optimizer: Any, label: str, names: Mapping[Tensor, str], tensors: dict[str, Tensor]
) -> dict[str, Any]:
    """Return an optimizer's values; its tensors are added."""
    if isinstance(optimizer, Mapping):
        encoded: dict[str, Any] = {"dict": tree.encode(dict(optimizer), label, tensors)}
        return encoded
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(
            f"the optimizer is a {type(optimizer).__name__}: give a torch.optim.Optimizer "
            "(or a wrapper's state_dict())"
        )
    groups, state = [], {}
    for parameter, name in optimizer_names(optimizer, names):
        if parameter in optimizer.state:
            state[name] = dict(optimizer.state[parameter])
    for number, group in enumerate(optimizer.param_groups):
        plain = {key: value for key, value in group.items() if key != "params"}
        encoded = tree.encode(plain, f"{label}/groups/{number}", tensors)
        known = dict(optimizer_names(optimizer, names))
        groups.append({"options": encoded, "params": [known[p] for p in group["params"]]})
    return {"state": tree.encode(state, f"{label}/state", tensors), "groups": groups}


def optimizer_names(
    optimizer: torch.optim.Optimizer, names: Mapping[Tensor, str]
) -> list[tuple[Tensor, str]]:
    """Return the parameters of an optimizer with their names.

    A parameter that no model has is named by its place: "group.number".
    """
    found = []
    for at, group in enumerate(optimizer.param_groups):
        for number, parameter in enumerate(group["params"]):
            found.append((parameter, names.get(parameter, f"{at}.{number}")))
    if len({name for _, name in found}) < len(found):
        raise StateMismatchError("two parameters of the optimizer have one name")
    return found
