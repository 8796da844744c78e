"""Saving and loading by one call."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch import distributed as dist

from hfai.checkpoint import state
from hfai.checkpoint.contents import CheckpointFiles, read_unreplaced
from hfai.checkpoint.handle import SaveHandle
from hfai.checkpoint.into import id_of
from hfai.checkpoint.loading import load_values
from hfai.checkpoint.parts import find_aliases, need_stored
from hfai.checkpoint.peers import TIMEOUT, Peers
from hfai.checkpoint.saver import Saver, Take
from hfai.checkpoint.staging import HOST_BUDGET, HostPool
from hfai.checkpoint.storage import Location, PathLike, locate

if TYPE_CHECKING:
    from ffrecord import StoreOptions

_MOST_THREADS = 4
_SMALL = (
    64 << 20
)  # bytes of what changes at any moment, which are copied before `save_async` returns
_lock = threading.Lock()
_savers: dict[Any, Saver] = {}


def save(
    path: PathLike,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    others: Mapping[str, Any] | None = None,
    *,
    scaler: Any = None,
    step: int | None = None,
    epoch: int | None = None,
    per_rank: Mapping[str, Any] | None = None,
    rng: bool = True,
    group: dist.ProcessGroup | None = None,
    threads: int | None = None,
    storage: StoreOptions | None = None,
    timeout: float = TIMEOUT,
) -> None:
    """Write a checkpoint; return when it is there, whole and flushed.

    In a distributed job all ranks call it, and each writes its own share. A checkpoint of that name
    is replaced in one step; if anything fails, it stays as it was.

    Args:
        path: A directory that is made, or a URL (s3://, gs://, az://, or what fsspec knows).
        model: A module, a state dict, or a list of them. Tensors may be DTensors (FSDP2, tensor
            parallelism); plain ones that several ranks have by one name are taken to be equal, and
            of buffers the first rank's count.
        optimizer: A torch optimizer, its state dict, or a list.
        scheduler: What has `state_dict`.
        others: Values of rank 0: tensors, arrays, numbers, strings, bytes, None, and lists, tuples,
            sets and dicts of them.
        scaler: What has `state_dict`, such as torch.amp.GradScaler.
        step: Of the training.
        epoch: Of the training.
        per_rank: Values of each rank, as `others`; given back to the same rank.
        rng: Save the state of Python's, NumPy's and torch's random number generators, of each rank.
        group: Whose ranks save; None: the default group.
        threads: That hash and write, in each rank; None: up to 4.
        storage: For object stores.
        timeout: Seconds that a rank waits for the others.

    Raises:
        CheckpointError: It could not be written, on this rank or another; all ranks get the error.
        StateMismatchError: Names are not unique, or ranks hold different tensors by one name.
        TypeError: Something is no value that is stored.
        OSError: This rank could not write.
    """
    saver = _saver(group, threads, timeout)
    location = _locate(saver, path, storage)
    take = _taking(saver, model, optimizer, scheduler, scaler, others, per_rank, rng)
    saver.save(location, take, step, epoch)


def save_async(
    path: PathLike,
    model: Any,
    optimizer: Any = None,
    scheduler: Any = None,
    others: Mapping[str, Any] | None = None,
    *,
    scaler: Any = None,
    step: int | None = None,
    epoch: int | None = None,
    per_rank: Mapping[str, Any] | None = None,
    rng: bool = True,
    group: dist.ProcessGroup | None = None,
    threads: int | None = None,
    storage: StoreOptions | None = None,
    timeout: float = TIMEOUT,
    host_budget: int = HOST_BUDGET,
    pool: HostPool | None = None,
) -> SaveHandle:
    """Begin to write a checkpoint while training goes on.

    The state is copied to buffers of the host, chunk by chunk and from GPUs on a stream of their
    own, and written from there by threads. The optimizer's next step waits until the copies are
    made, and a save that is running is waited for first; whoever changes parameters otherwise calls
    `wait_staged` of the handle before. All else (buffers, options such as the learning rate, the
    members of a plain state dict that are no parameters of the optimizer) may be changed at once.
    Without a torch optimizer that can wait, the call itself returns when they are made.

    Args:
        path: As for `save`, and so are all others up to `timeout`.
        model: …
        optimizer: …
        scheduler: …
        others: …
        scaler: …
        step: …
        epoch: …
        per_rank: …
        rng: …
        group: …
        threads: …
        storage: …
        timeout: …
        host_budget: Bytes of buffers in this rank; with less than the state, copying waits for
            writing.
        pool: Buffers to use, which `prepare` returns; `host_budget` then means nothing. Without it
            each save makes buffers anew, which from a GPU takes about 0.1 s a GB.

    Returns:
        A handle; `wait` raises what went wrong.

    Raises:
        CheckpointError: Another rank could not begin.
        StateMismatchError: As for `save`.
        TypeError: As for `save`.
        OSError: This rank could not begin.
    """
    saver = _saver(group, threads, timeout)
    location = _locate(saver, path, storage)
    take = _taking(saver, model, optimizer, scheduler, scaler, others, per_rank, rng)
    if pool is None:
        with saver.failing_together():
            pool = HostPool(host_budget)
    return begin(saver, location, take, step, epoch, pool, optimizer)


def _taking(saver: Saver, *values: Any) -> Take:
    """Return what gives the state, from `state.capture`'s arguments up to the rank."""
    capture: Callable[..., state.Captured] = state.capture
    return lambda: capture(*values, saver.peers.rank)


def begin(
    saver: Saver,
    location: Location,
    take: Take,
    step: int | None,
    epoch: int | None,
    pool: HostPool,
    optimizer: Any,
) -> SaveHandle:
    """Start a save in the background; see `save_async`."""
    with saver.failing_together():
        optimizers = state.as_list(optimizer, "optimizer") or []
    can_wait = bool(optimizers) and all(isinstance(o, torch.optim.Optimizer) for o in optimizers)
    guarded = False

    def take_loose() -> state.Captured:
        nonlocal guarded
        captured = take()
        for name, tensor in captured.tensors.items():
            need_stored(name, tensor)
        guarded = can_wait and _copy_loose(captured, optimizers)
        return captured

    handle = saver.save_async(location, take_loose, step, epoch, pool)
    if guarded:
        handle._guard(optimizers)
    else:
        handle.wait_staged()
    return handle


def _copy_loose(captured: state.Captured, optimizers: list[Any]) -> bool:
    """Copy the tensors that may change before the optimizer's next step.

    These are buffers, the optimizer's options, the user's, and of a plain state dict all but the
    optimizer's parameters. Tensors that are one stay one.

    Returns:
        Whether they were; if they are many, the caller waits until all is copied.
    """
    tensors = captured.tensors
    held = {id_of(p) for one in optimizers for group in one.param_groups for p in group["params"]}
    waits = {
        name
        for name, tensor in tensors.items()
        if id_of(tensor) in held
        or (name.startswith(("model/", "optimizer/")) and name not in captured.loose)
    }
    aliases = find_aliases(tensors)
    waits |= {aliases.get(name, name) for name in waits}
    loose = [name for name in tensors if aliases.get(name, name) not in waits]
    if sum(tensors[name].nbytes for name in loose if name not in aliases) > _SMALL:
        return False
    copies = {name: tensors[name].detach().clone() for name in loose if name not in aliases}
    for name in loose:
        tensors[name] = copies[aliases.get(name, name)]
    return True


def load(
    path: PathLike,
    map_location: torch.device | str = "cpu",
    *,
    tensors: Callable[[str], bool] | None = None,
    verify: bool = True,
    threads: int | None = None,
    storage: StoreOptions | None = None,
    rank: int | None = None,
    progress: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Return all that a checkpoint holds, whole tensors, whatever number of ranks wrote it.

    Args:
        path: A directory or URL.
        map_location: Where tensors are made; "meta": shapes and types, no data is read.
        tensors: Says, for a tensor's name as `hfai checkpoint show` prints it, whether it is read;
            the others are on the meta device.
        verify: Compare hashes; False is for saving what can be saved from a damaged file.
        threads: That read and hash; None: up to 4.
        storage: For object stores.
        rank: Whose own values ("rng", "per_rank") are given; None: this process's rank.
        progress: Called with numbers of bytes, from several threads.

    Returns:
        "model" and, where they were saved, "optimizer" (its parameters by name), "scheduler",
        "scaler", "rng", "per_rank", "step", "epoch"; and the members of `others`, of which one
        named "step" or "epoch" stands in place of the save's own.

    Raises:
        NoCheckpointError: There is no checkpoint, or one that was never finished.
        DamagedCheckpointError: Bytes are not those that were written; says which file and tensor.
        CheckpointError: The format is of a newer version.
        OSError: A file cannot be read.
    """

    def read_all(files: CheckpointFiles) -> dict[str, Any]:
        found = load_values(
            files,
            torch.device(map_location),
            threads or default_threads(),
            this_rank() if rank is None else rank,
            tensors or (lambda name: True),
            progress or (lambda count: None),
        )
        for name in ("step", "epoch"):
            value = getattr(files.commit, name)
            if value is not None:
                found.setdefault(name, value)
        return found

    return read_unreplaced(path, storage, verify, read_all)


def load_tensor(
    path: PathLike,
    name: str,
    map_location: torch.device | str = "cpu",
    *,
    verify: bool = True,
    storage: StoreOptions | None = None,
) -> Tensor:
    """Return one tensor, reading nothing else.

    Args:
        path: A directory or URL.
        name: As `hfai checkpoint show` prints it, such as "model/layer.weight".
        map_location: Where it is made.
        verify: Compare hashes.
        storage: For object stores.

    Raises:
        KeyError: There is no tensor of that name.
        DamagedCheckpointError: Its bytes are not those that were written.
        NoCheckpointError: There is no checkpoint.
    """
    from hfai.checkpoint.loading import tensor_infos
    from hfai.checkpoint.reader import MissingTensorError, Wanted, read

    def read_one(files: CheckpointFiles) -> Tensor:
        infos = tensor_infos(files)
        if name not in infos:
            near = [known for known in infos if name in known][:3]
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise MissingTensorError(f"{files.path} has no tensor {name!r}{hint}")
        dtype = getattr(torch, infos[name].dtype)
        out = torch.empty(infos[name].shape, dtype=dtype, device=map_location)
        target = files.aliases().get(name, name)
        read(files, [Wanted(target, (0,) * out.ndim, out)], default_threads())
        return out

    return read_unreplaced(path, storage, verify, read_one)


def default_threads() -> int:
    """Return how many threads hash and move data, in each rank."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1") or 1)
    return max(1, min(_MOST_THREADS, (cores or 1) // max(1, ranks)))


def this_rank() -> int:
    """Return this process's rank in the default group; 0 where there is none."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def _locate(saver: Saver, path: PathLike, storage: StoreOptions | None) -> Location:
    """Return the place of a save, where what dead ones left is removed."""
    with saver.failing_together():
        location = locate(path, storage)
    if saver.peers.rank == 0:
        location.sweep_beside()
    return location


def _saver(group: dist.ProcessGroup | None, threads: int | None, timeout: float) -> Saver:
    """Return the saver of a group, or of this process alone.

    It remembers names and shapes from save to save, and makes its saves one after the other.
    """
    threads = threads or default_threads()
    distributed = dist.is_available() and dist.is_initialized()
    # A forked child has none of its parent's threads, and so none of its saves.
    key = os.getpid(), id(dist.group.WORLD if group is None else group) if distributed else 0
    # Made of what makes sense on all ranks, so that one with bad arguments is among them.
    with _lock:
        saver = _savers.get(key)
        if saver is None or not saver.peers.alive():
            _savers[key] = saver = Saver(Peers(group), default_threads())
    with saver.failing_together():
        if threads < 1:
            raise ValueError(f"threads is {threads}: give 1 or more")
        if not timeout > 0:
            raise ValueError(f"timeout is {timeout!r}: give seconds, more than 0")
    saver.peers.timeout, saver.threads = timeout, threads
    return saver
