"""The tensors of a model and an optimizer as places that a checkpoint is read into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hfai.checkpoint import state, tree
from hfai.checkpoint.errors import StateMismatchError
from hfai.checkpoint.parts import box_of, dtype_name, is_dtensor, local_of
from hfai.checkpoint.reader import Wanted

if TYPE_CHECKING:
    from hfai.checkpoint.loading import TensorInfo

Act = Callable[[tree.Fetch], None]
_SHOWN = 5  # names in a message


class Places:
    """Where tensors of a checkpoint are to go.

    Args:
        path: The checkpoint, for messages.
        infos: Its tensors.
        aliases: Further names of tensors.
        strict: Whether names must agree.
        cast: Whether types may differ.
        device: Where tensors of the meta device are made.

    Attributes:
        wanted: What is to be read.
        missing: Names that the checkpoint does not have.
        unexpected: Names that nobody asked for.
    """

    def __init__(
        self,
        path: str,
        infos: Mapping[str, TensorInfo],
        aliases: Mapping[str, str],
        strict: bool,
        cast: bool,
        device: torch.device,
    ) -> None:
        self.wanted: list[Wanted] = []
        self.missing: list[str] = []
        self.unexpected: list[str] = []
        self.device = device
        self._path, self._infos, self._aliases = path, infos, aliases
        self._strict, self._cast = strict, cast
        self._asked: set[str] = set()
        self._made: dict[str, Tensor] = {}
        self._filled: dict[int, str] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._wrong: list[str] = []

    def fill(self, name: str, tensor: Tensor) -> None:
        """Ask for a tensor to be filled."""
        self._asked.add(name)
        info = self._infos.get(name)
        if info is None:
            self.lacks(name)
            return
        target = self._aliases.get(name, name)
        if self._filled.get(id(tensor)) == target:
            return  # a tied tensor, once
        self._filled[id(tensor)] = target
        dtype = dtype_name(tensor.dtype)
        if tuple(tensor.shape) != info.shape:
            self._wrong.append(f"{name} is {_shape(tensor.shape)}, saved {_shape(info.shape)}")
            return
        if dtype != info.dtype and not self._cast:
            self._wrong.append(f"{name} is {dtype}, saved {info.dtype} (cast=True converts)")
            return
        offsets: tuple[int, ...] = (0,) * tensor.ndim
        local: Any = tensor.detach()
        if is_dtensor(tensor):
            if local.device_mesh.get_coordinate() is None:
                return
            offsets, _ = box_of(name, tensor)
            local = local.to_local()
        if dtype != info.dtype:
            place = torch.empty(local.shape, dtype=getattr(torch, info.dtype), device=local.device)
            self._copies.append((place, local))
            local = place
        self.wanted.append(Wanted(target, offsets, local))

    def make(self, name: str, device: torch.device | None = None) -> Tensor:
        """Ask for a tensor to be made and filled; several names of one tensor give the same."""
        self._asked.add(name)
        target = self._aliases.get(name, name)
        if target not in self._made:
            info = self._infos.get(target)
            if info is None:
                self.lacks(name)
                return torch.empty(0)
            made = torch.empty(
                info.shape, dtype=getattr(torch, info.dtype), device=device or torch.device("cpu")
            )
            self._made[target] = made
            self.wanted.append(Wanted(target, (0,) * made.ndim, made))
        return self._made[target]

    def info(self, name: str) -> TensorInfo | None:
        """Return what the checkpoint has of a tensor."""
        return self._infos.get(name)

    def fetch(self, name: str) -> Tensor:
        """Return a tensor that was made."""
        return self._made[self._aliases.get(name, name)]

    def keep(self, name: str, tensor: Tensor) -> None:
        """Let `fetch` give a tensor that is filled in place."""
        self._made[self._aliases.get(name, name)] = tensor

    def lacks(self, name: str) -> None:
        """Note that the checkpoint does not have something."""
        self.missing.append(name)

    def need_all(self, with_optimizer: bool) -> None:
        """Compare names.

        Raises:
            StateMismatchError: They differ and must not, or shapes or types do.
        """
        parts = ("model/", "optimizer/") if with_optimizer else ("model/",)
        self.unexpected += [
            name for name in self._infos if name.startswith(parts) and name not in self._asked
        ]
        found = [*self._wrong]
        if self._strict:
            if self.missing:
                found.append(f"not in the checkpoint: {_listed(self.missing)}")
            if self.unexpected:
                found.append(f"only in the checkpoint: {_listed(self.unexpected)}")
        if found:
            hint = "" if self._wrong else " (strict=False loads what both have)"
            raise StateMismatchError(
                f"{self._path} does not fit: {'; '.join(found[: _SHOWN + 2])}{hint}"
            )

    def settle(self) -> None:
        """Convert what was read in another type."""
        with torch.no_grad():
            for source, target in self._copies:
                target.copy_(source)


def fill_model(model: Any, values: Mapping[str, Any], places: Places) -> list[Act]:
    """Ask for all tensors of a model, or several.

    Returns:
        What to do once they are read.

    Raises:
        StateMismatchError: The checkpoint has no model, or another number of them.
        TypeError: A model is no module and no state dict.
    """
    models = state.as_list(model, "model") or []
    saved = values.get("model")
    if saved is None:
        raise StateMismatchError("the checkpoint has no model: it was saved without one")
    if len(saved) != len(models) or values["models"] != isinstance(model, (list, tuple)):
        there = " in a list" if values["models"] else ""
        here = " in a list" if isinstance(model, (list, tuple)) else ""
        raise StateMismatchError(
            f"the checkpoint has {len(saved)} model(s){there}, and {len(models)} were given{here}"
        )
    acts: list[Act] = []
    for one, label, encoded in zip(
        models, state.labels("model", model, models), saved, strict=True
    ):
        if isinstance(one, nn.Module):
            acts += _fill_module(one, label, encoded, places)
        elif isinstance(one, Mapping):
            for name, value in one.items():
                if isinstance(value, Tensor):
                    places.fill(f"{label}/{name}", value)
        else:
            raise TypeError(f"the model is a {type(one).__name__}: give a torch.nn.Module")
    return acts


def _fill_module(
    model: nn.Module, label: str, encoded: Mapping[str, Any], places: Places
) -> list[Act]:
    _materialize(model, places.device)
    live = {id_of(t) for t in (*model.parameters(), *model.buffers())}
    indirect: dict[str, str] = {}  # names that a hook or a module's own code gives a value for
    extra: dict[str, Any] = {}
    for name, (full, value) in state.named_state(model).items():
        key = f"{label}/{name}"
        if not isinstance(value, Tensor):
            if name in encoded:
                extra[full] = encoded[name]
                for inner in tree.names_in(encoded[name]):
                    places.make(inner)
            else:
                places.lacks(key)
        elif id_of(value) in live:
            places.fill(key, value)
        elif places.info(key) is None:
            places.fill(key, value)  # says that it is missing
        else:
            places.make(key, value.device)
            indirect[full] = key
    if not indirect and not extra:
        return []

    def act(fetch: tree.Fetch) -> None:
        loaded = {full: fetch(key) for full, key in indirect.items()}
        loaded.update({full: tree.decode(value, fetch) for full, value in extra.items()})
        model.load_state_dict(loaded, strict=False)

    return [act]


def id_of(tensor: Any) -> tuple[object, ...]:
    """Return what tells a tensor's memory from others."""
    local = local_of(tensor)
    return local.data_ptr(), tuple(local.shape), local.stride(), local.dtype, local.device


def _materialize(model: nn.Module, device: torch.device) -> None:
    """Make memory for what is on the meta device; what was one tensor before stays one."""
    made: dict[int, Tensor] = {}
    for module in model.modules():
        stores: list[Any] = [module._parameters, module._buffers]
        for store in stores:
            for name, old in store.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in made:
                    new = torch.empty_like(old, device=device)
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = new
                store[name] = made[id(old)]


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
    wanted = encoded["state"].get("$dict") or encoded["state"]
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
                f"parameter group {at} of the checkpoint does not have {_listed(lost)}"
            )
    return saved


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "a single number"
