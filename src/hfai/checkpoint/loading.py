"""Loading: as new tensors, or into the tensors of a model and an optimizer.

Into: every tensor of the model is a place, and so is every tensor of the optimizer's state, made
where it is not there yet. All places are filled by one `read`, each rank its own boxes, so that a
checkpoint of any number of ranks loads onto any other. Then values that are no tensors are set.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from hfai.checkpoint import rng as rng_module
from hfai.checkpoint import tree
from hfai.checkpoint.contents import CheckpointFiles, read_unreplaced
from hfai.checkpoint.errors import StateMismatchError
from hfai.checkpoint.format import Slice
from hfai.checkpoint.into import Places, fill_model
from hfai.checkpoint.into_optimizer import fill_optimizer
from hfai.checkpoint.reader import MissingTensorError, Wanted, check, read
from hfai.checkpoint.storage import Location, PathLike

if TYPE_CHECKING:
    from ffrecord import StoreOptions


class TensorInfo(NamedTuple):
    """What a checkpoint has of a tensor.

    Attributes:
        dtype: torch's name of its type.
        shape: Of all of it.
    """

    dtype: str
    shape: tuple[int, ...]


def tensor_infos(files: CheckpointFiles, rank: int | None = None) -> dict[str, TensorInfo]:
    """Return all tensors of a checkpoint, by name; other names of the same tensor too.

    Args:
        files: The checkpoint.
        rank: Whose own tensors are among them; None: those of all ranks, which takes all indexes.
    """
    known = files.state()["tensors"]
    found = {name: TensorInfo(dtype, tuple(shape)) for name, (dtype, shape) in known.items()}
    ranks = range(files.commit.world) if rank is None else [rank] * (rank < files.commit.world)
    for index in map(files.index, ranks):
        found.update({piece.name: _info(piece) for piece in index.slices})
    for name, target in files.aliases(rank).items():
        if target in found:
            found[name] = found[target]
    return found


def _info(piece: Slice) -> TensorInfo:
    return TensorInfo(piece.dtype, piece.shape)


def load_values(
    files: CheckpointFiles,
    device: torch.device,
    threads: int,
    rank: int,
    wanted: Callable[[str], bool] = lambda name: True,
    progress: Callable[[int], object] = lambda count: None,
) -> dict[str, Any]:
    """Return a checkpoint's values with its tensors, as `hfai.checkpoint.load` gives them.

    Args:
        files: The checkpoint.
        device: Where tensors are made; the meta device: nothing is read.
        threads: That read.
        rank: Whose own values are given.
        wanted: Names of tensors that are read, a tied one by any of its names; the others stay on
            the meta device.
        progress: Called with numbers of bytes.
    """
    values, own = encoded_values(files, rank)
    infos, aliases = tensor_infos(files, rank), files.aliases(rank)
    made: dict[str, Tensor] = {}
    asked = {aliases[name] for name in aliases if wanted(name)}  # by another name

    def fetch(name: str) -> Tensor:
        name = aliases.get(name, name)
        if name not in made:
            if name not in infos:
                raise MissingTensorError(f"{files.path} has no tensor {name}")
            place = device if name in asked or wanted(name) else torch.device("meta")
            dtype = getattr(torch, infos[name].dtype)
            made[name] = torch.empty(infos[name].shape, dtype=dtype, device=place)
        return made[name]

    # Twice: arrays are made from tensors that are filled by then.
    for encoded in (values, own):
        for name in tree.names_in(encoded, f"{files.path}: a value"):
            fetch(name)
    items = [
        Wanted(name, (0,) * tensor.ndim, tensor)
        for name, tensor in made.items()
        if not tensor.is_meta
    ]
    read(files, items, threads, rank, progress)
    return user_values(values, own, fetch)


def encoded_values(files: CheckpointFiles, rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the values of all ranks, merged where they differ, and those of one rank alone."""
    found = files.state()
    values = found["values"]
    if not found["complete"]:
        for index in files.indexes():
            values = _merged(values, index.own.get("values", {}))
    own = dict(files.index(rank).own) if rank < files.commit.world else {}
    own.pop("values", None)
    return values, own


def _merged(one: Any, other: Any) -> Any:
    """Return both: objects by key, lists of parameters as a union; else the first's value."""
    if isinstance(one, dict) and isinstance(other, dict):
        found = {key: _merged(value, other[key]) if key in other else value
                 for key, value in one.items()}  # fmt: skip
        found.update({key: value for key, value in other.items() if key not in one})
        return found
    if isinstance(one, list) and isinstance(other, list):
        if all(isinstance(item, str) for item in [*one, *other]):
            return [*one, *(item for item in other if item not in one)]
        if len(one) == len(other):
            return [_merged(a, b) for a, b in zip(one, other, strict=True)]
    return one


def user_values(
    values: Mapping[str, Any], own: Mapping[str, Any], fetch: tree.Fetch
) -> dict[str, Any]:
    """Return values as a user knows them."""
    found: dict[str, Any] = {}
    if "model" in values:
        models = [tree.decode(one, fetch) for one in values["model"]]
        found["model"] = models if values["models"] else models[0]
    if "optimizer" in values:
        optimizers = [_user_optimizer(one, fetch) for one in values["optimizer"]]
        found["optimizer"] = optimizers if values["optimizers"] else optimizers[0]
    for name in ("scheduler", "scaler"):
        if name in values:
            found[name] = tree.decode(values[name], fetch)
    for name in ("per_rank", "rng"):
        if name in own:
            found[name] = tree.decode(own[name], fetch)
    found.update(tree.decode(values["others"], fetch))
    return found


def _user_optimizer(encoded: Mapping[str, Any], fetch: tree.Fetch) -> dict[str, Any]:
    """Return an optimizer's state with parameters' names where torch has their numbers."""
    if "dict" in encoded:
        decoded: dict[str, Any] = tree.decode(encoded["dict"], fetch)
        return decoded
    groups = [
        {**tree.decode(group["options"], fetch), "params": group["params"]}
        for group in encoded["groups"]
    ]
    return {"state": tree.decode(encoded["state"], fetch), "param_groups": groups}


class Loaded(NamedTuple):
    """What `load_into` returns.

    Attributes:
        others: The user's values.
        per_rank: This rank's own; None where the checkpoint has none for this rank.
        step: The training's, if it was saved.
        epoch: The training's, if it was saved.
        path: Of the checkpoint.
        missing: Names of the model or optimizer that the checkpoint does not have.
        unexpected: Names of the checkpoint that model and optimizer do not have.
    """

    others: dict[str, Any]
    per_rank: Any
    step: int | None
    epoch: int | None
    path: str
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


def load_into(
    path: PathLike | Location,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    strict: bool = True,
    cast: bool = False,
    rng: bool = False,
    verify: bool = True,
    device: torch.device | str | None = None,
    threads: int | None = None,
    storage: StoreOptions | None = None,
    rank: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> Loaded:
    """Load a checkpoint into a model and what trains it.

    Tensors are filled in place, so that tied ones stay tied; those on the meta device are made on
    `device`. Each rank of a distributed job calls it, reads what its own shards need, and waits for
    nobody. If it raises, model and optimizer may be filled in part; what was on the meta device is
    there again.

    Args:
        path: A directory or URL.
        model: A module, DDP or compiled or sharded by FSDP2 or tensor parallelism, or a state dict
            (values that are no tensors are put into it), or a list.
        optimizer: An optimizer, or a list; its state is made where it has none yet.
        scheduler: What has `load_state_dict`.
        scaler: The same, for torch.amp.GradScaler.
        strict: Raise where the checkpoint has other names than model and optimizer; False: fill
            what both have, and report the rest.
        cast: Convert tensors whose type differs; shapes must be equal always.
        rng: Put the random number generators into their saved state too.
        verify: Compare hashes; False is for saving what can be saved from a damaged file.
        device: Where tensors of the meta device are made; None: the CPU.
        threads: That read and hash; None: up to 4.
        storage: For object stores.
        rank: Whose own values are taken; None: this process's rank.
        progress: Called with numbers of bytes, from several threads.

    Raises:
        NoCheckpointError: There is no checkpoint, or one that was never finished.
        DamagedCheckpointError: Bytes are not those that were written; says which file and tensor.
        StateMismatchError: Names, shapes or types differ; or a tensor of the meta device is not in
            the checkpoint, such as a buffer that is not persistent.
        CheckpointError: The format is of a newer version.
        OSError: A file cannot be read.
    """
    return _load_into(
        path, model, optimizer, scheduler, scaler, strict, cast, rng, verify, device, threads,
        storage, rank, progress, False,
    )  # fmt: skip


def check_into(
    path: PathLike | Location,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    *,
    scaler: Any = None,
    strict: bool = True,
    cast: bool = False,
    rng: bool = False,
    threads: int | None = None,
    rank: int | None = None,
) -> None:
    """Read and compare all that `load_into` would read, and change nothing.

    Args and errors are those of `load_into`.
    """
    _load_into(
        path, model, optimizer, scheduler, scaler, strict, cast, rng, True, None, threads, None,
        rank, None, True,
    )  # fmt: skip


def _load_into(
    path: PathLike | Location,
    model: Any,
    optimizer: Any,
    scheduler: Any,
    scaler: Any,
    strict: bool,
    cast: bool,
    rng: bool,
    verify: bool,
    device: torch.device | str | None,
    threads: int | None,
    storage: StoreOptions | None,
    rank: int | None,
    progress: Callable[[int], object] | None,
    check_only: bool,
) -> Loaded:
    from hfai.checkpoint.api import default_threads, this_rank

    mine = this_rank() if rank is None else rank
    threads = threads or default_threads()

    def fill(files: CheckpointFiles) -> Loaded:
        with contextlib.ExitStack() as stack:
            values, own = encoded_values(files, mine)
            infos, aliases = tensor_infos(files, mine), files.aliases(mine)
            places = Places(files.path, infos, aliases, strict, cast, torch.device(device or "cpu"))
            stack.callback(places.put_back)
            after: list[Callable[[tree.Fetch], None]] = []
            after += fill_model(model, values, places)
            if optimizer is not None:
                after += fill_optimizer(optimizer, model, values, places)
            rest = _rest(values, own, scheduler, scaler, rng, places)
            places.need_all(optimizer is not None)
            first = mine % files.commit.world
            others: dict[str, Any] = {}
            per_rank = None
            with _as_mismatch():
                if check_only:
                    check(files, places.wanted, threads, first)
                else:
                    read(files, places.wanted, threads, first, progress or (lambda count: None))
            if not check_only:
                places.settle()
                for act in after:
                    act(places.fetch)
                others, per_rank = rest()
                stack.pop_all()
            return Loaded(
                others, per_rank, files.commit.step, files.commit.epoch, files.path,
                tuple(places.missing), tuple(places.unexpected),
            )  # fmt: skip

    return read_unreplaced(path, storage, verify, fill)


def _rest(
    values: Mapping[str, Any],
    own: Mapping[str, Any],
    scheduler: Any,
    scaler: Any,
    rng: bool,
    places: Places,
) -> Callable[[], tuple[dict[str, Any], Any]]:
    """Ask for the tensors of what is small; return what sets it once they are read."""
    decoded: list[tuple[str, Any]] = [("others", values["others"])]
    for name, target in (("scheduler", scheduler), ("scaler", scaler)):
        if target is not None:
            if name in values:
                decoded.append((name, values[name]))
            else:
                places.lacks(name)
    if "per_rank" in own:
        decoded.append(("per_rank", own["per_rank"]))
    if rng and "rng" in own:
        decoded.append(("rng", own["rng"]))
    for part, encoded in decoded:
        for name in tree.names_in(encoded, f"{part} in {places.path}"):
            places.make(name)

    def act() -> tuple[dict[str, Any], Any]:
        found = {name: tree.decode(encoded, places.fetch) for name, encoded in decoded}
        if "scheduler" in found:
            scheduler.load_state_dict(found["scheduler"])
        if "scaler" in found:
            scaler.load_state_dict(found["scaler"])
        if "rng" in found:
            rng_module.restore(found["rng"])
        return found["others"], found.get("per_rank")

    return act


@contextlib.contextmanager
def _as_mismatch() -> Any:
    try:
        yield
    except MissingTensorError as error:
        raise StateMismatchError(str(error)) from None
