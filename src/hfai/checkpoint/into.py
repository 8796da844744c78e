"""The tensors of a model as places that a checkpoint is read into."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, MutableMapping
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
        path: The checkpoint, for messages.
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
        self.path = path
        self._infos, self._aliases = infos, aliases
        self._strict, self._cast = strict, cast
        self._asked: set[str] = set()
        self._made: dict[str, Tensor] = {}
        self._filled: dict[tuple[object, ...], Wanted] = {}  # by the place in memory
        self._undo: list[Callable[[], None]] = []
        self._valueless: list[str] = []
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
        dtype = dtype_name(tensor.dtype)
        if tuple(tensor.shape) != info.shape:
            self._wrong.append(f"{name} is {_shape(tensor.shape)}, saved {_shape(info.shape)}")
            return
        if dtype != info.dtype and not self._cast:
            self._wrong.append(f"{name} is {dtype}, saved {info.dtype} (cast=True converts)")
            return
        if tensor.is_meta:
            self._wrong.append(f"{name} has no memory (the meta device): give it some first")
            return
        offsets: tuple[int, ...] = (0,) * tensor.ndim
        local: Any = tensor.detach()
        if is_dtensor(tensor):
            if local.device_mesh.get_coordinate() is None:
                return
            offsets, _ = box_of(name, tensor)
            local = local.to_local()
        place = id_of(local) if local.numel() else ()
        before = self._filled.get(place) if place else None
        if before is not None and before.name == target:
            return  # a tied tensor, once
        if before is not None:  # tied here and not there: as in torch, the last name counts
            self.wanted = [item for item in self.wanted if item is not before]
            self._copies = [pair for pair in self._copies if pair[0] is not before.out]
        if dtype != info.dtype:
            read_to = torch.empty(
                local.shape, dtype=getattr(torch, info.dtype), device=local.device
            )
            self._copies.append((read_to, local))
            local = read_to
        wanted = Wanted(target, offsets, local)
        self.wanted.append(wanted)
        if place:
            self._filled[place] = wanted

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

    def leaves_without_values(self, name: str) -> None:
        """Note that a tensor was on the meta device, and nothing will fill it."""
        self._valueless.append(name)

    def on_failure(self, undo: Callable[[], None]) -> None:
        """Note what `put_back` has to do."""
        self._undo.append(undo)

    def put_back(self) -> None:
        """Put the meta device's tensors back where memory was made for them in vain."""
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

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
        if self._valueless:
            found.append(
                f"on the meta device and not in the checkpoint: {listed(self._valueless)}: give "
                "these memory and values before loading"
            )
        if self._strict:
            if self.missing:
                found.append(f"not in the checkpoint: {listed(self.missing)}")
            if self.unexpected:
                found.append(f"only in the checkpoint: {listed(self.unexpected)}")
        if found:
            hint = "" if self._wrong or self._valueless else " (strict=False loads what both have)"
            raise StateMismatchError(
                f"{self.path} does not fit: {'; '.join(found[: _SHOWN + 2])}{hint}"
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
            acts += _fill_mapping(one, label, encoded, places)
        else:
            raise TypeError(f"the model is a {type(one).__name__}: give a torch.nn.Module")
    return acts


def _fill_mapping(
    state_dict: Mapping[Any, Any], label: str, encoded: Mapping[str, Any], places: Places
) -> list[Act]:
    """Ask for a state dict: tensors are filled where they are, other values put in their place."""
    saved = tree.members(encoded)
    others: dict[Any, Any] = {}
    acts: list[Act] = []
    for key, value in state_dict.items():
        name = f"{label}/{key}"
        if isinstance(value, Tensor):
            places.fill(name, value)
        elif key not in saved:
            places.lacks(name)
        elif isinstance(value, Mapping) and value and tree.is_dict(saved[key]):
            acts += _fill_mapping(value, name, saved[key], places)
        else:
            others[key] = saved[key]
            for inner in tree.names_in(saved[key]):
                places.make(inner)
    places.unexpected += [
        f"{label}/{key}"
        for key, value in saved.items()
        if key not in state_dict and not tree.names_in(value)
    ]
    if others and not isinstance(state_dict, MutableMapping):
        raise TypeError(
            f"{label} is a {type(state_dict).__name__}, in which nothing can be put: give a dict"
        )

    def act(fetch: tree.Fetch) -> None:
        for key, value in others.items():
            state_dict[key] = tree.decode(value, fetch)  # type: ignore[index]

    return [*acts, act]


def _fill_module(
    model: nn.Module, label: str, encoded: Mapping[str, Any], places: Places
) -> list[Act]:
    encoded = tree.members(encoded)
    made = _materialize(model, places)
    live = {id_of(t) for t in (*model.parameters(), *model.buffers())}
    indirect: dict[str, str] = {}  # names that a hook or a module's own code gives a value for
    extra: dict[str, Any] = {}
    filled: set[tuple[object, ...]] = set()
    asked: set[str] = set()
    for name, (full, value) in state.named_state(model).items():
        key = f"{label}/{name}"
        asked.add(key)
        if not isinstance(value, Tensor):
            if name in encoded:
                extra[full] = encoded[name]
                for inner in tree.names_in(encoded[name]):
                    places.make(inner)
            else:
                places.lacks(key)
        elif id_of(value) in live:
            places.fill(key, value)
            if places.info(key) is not None:
                filled.add(id_of(value))
        elif places.info(key) is None:
            places.fill(key, value)  # says that it is missing
        else:
            places.make(key, value.device)
            indirect[full] = key
    for name, tensor in made.items():
        if local_of(tensor).numel() and id_of(tensor) not in filled and name not in indirect:
            places.leaves_without_values(f"{label}/{name}")
    places.unexpected += [
        f"{label}/{name}"
        for name, value in encoded.items()
        if f"{label}/{name}" not in asked and not tree.names_in(value)
    ]
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


def _materialize(model: nn.Module, places: Places) -> dict[str, Tensor]:
    """Make memory for what is on the meta device.

    What was one tensor before stays one, and tensors that were the same memory stay so.

    Returns:
        What was made, by its name.
    """
    made: dict[int, Tensor] = {}
    memory: dict[tuple[object, ...], Tensor] = {}
    found: dict[str, Tensor] = {}
    for prefix, module in model.named_modules():
        stores: list[Any] = [module._parameters, module._buffers]
        for store in stores:
            for name, old in store.items():
                if old is None or not old.is_meta:
                    continue
                if id(old) not in made:
                    shared = memory.get(_meta_id_of(old))
                    if shared is None:
                        new = torch.empty_like(old, device=places.device)
                        memory[_meta_id_of(old)] = new
                    else:
                        new = shared.detach()
                    if isinstance(old, nn.Parameter):
                        new = nn.Parameter(new, requires_grad=old.requires_grad)
                    made[id(old)] = new
                    found[f"{prefix}.{name}" if prefix else name] = new
                store[name] = made[id(old)]
                places.on_failure(functools.partial(store.__setitem__, name, old))
    return found


def _meta_id_of(tensor: Any) -> tuple[object, ...]:
    """Return what tells memory from others on the meta device, where it has no address."""
    local = local_of(tensor)
    storage = local.untyped_storage()._cdata
    return storage, local.storage_offset(), tuple(local.shape), local.stride(), local.dtype


def listed(names: list[str]) -> str:
    """Return the first few of many names, for a message."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def _shape(shape: Any) -> str:
    return "×".join(map(str, shape)) or "a single number"
