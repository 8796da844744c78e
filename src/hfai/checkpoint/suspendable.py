"""A training that can be suspended: one call before the loop, one in it.

    epoch, step, others = hfai.checkpoint.init(model, optimizer, ckpt_path="runs/a")
    for epoch in range(epoch, epochs):
        for step, batch in enumerate(loader, start=step):
            ...
            model.try_save(epoch, step + 1)
        step = 0

`try_save` asks `hfai.client` whether to suspend. As a rule nobody has, and that is all it does.
Otherwise all ranks save together and end with the exit code that means "start me again"; then
`init` finds the checkpoint. `ckpt_path` is a directory of checkpoints under `CheckpointManager`: if
the newest is damaged, the one before is loaded, with a warning.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from hfai import client
from hfai.checkpoint.manager import CheckpointManager
from hfai.checkpoint.storage import PathLike, locate

_OWN = "try_save"  # what is ours among the values of a checkpoint
KEEP = 2


def init(
    model: nn.Module,
    optimizer: Any = None,
    scheduler: Any = None,
    amp_scaler: Any = None,
    ckpt_path: PathLike | None = None,
    *,
    loader: Any = None,
    keep: int = KEEP,
    timeout: float = 500,
) -> tuple[int, int, dict[str, Any] | None]:
    """Load the newest checkpoint of a training, if there is one, and give `model` its `try_save`.

    All ranks call it, after the model is wrapped and before loader workers are made. From then on
    SIGTERM and SIGUSR1 are requests to suspend (`hfai.client.listen`).

    `model.try_save(epoch, step, others=None, force=False)` is called by all ranks at the end of
    each step. It saves if somebody has asked to suspend, and ends the process
    (`hfai.client.go_suspend`); with `force` it saves in any case. It returns whether it has saved.
    `epoch` and `step` are where to go on: of a loop over `step`, give `step + 1`.

    Args:
        model: A module, wrapped by DistributedDataParallel, `fully_shard` or nothing.
        optimizer: A torch optimizer.
        scheduler: What has `state_dict` and `load_state_dict`.
        amp_scaler: Likewise: a torch.amp.GradScaler.
        ckpt_path: A directory of checkpoints; it is made by the first save. A path or URL.
        loader: Likewise: an `ffrecord.torch.DataLoader` with a `GlobalBatchSampler`, say. It goes
            on behind the last batch it has handed out. One that draws its workers' seeds from
            torch's own generator gets a generator for them, so that a resumed run's numbers stay
            those of an unbroken one.
        keep: How many checkpoints stay.
        timeout: Seconds that ranks wait for one another.

    Returns:
        `epoch`, `step` and `others` as they were given to `try_save`; `(0, 0, None)` where there is
        no checkpoint. Random number generators of all devices are as they were, on each rank.

    Raises:
        TypeError: `ckpt_path` is missing, `model` is no module, or `loader` has no place.
        ValueError: `ckpt_path` is a checkpoint itself, or none of ours; the loader's place is of
            another number of ranks.
        hfai.checkpoint.CheckpointError: Checkpoints are there, and none can be loaded.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}: give a torch.nn.Module")
    if ckpt_path is None:
        raise TypeError("ckpt_path is missing: give the directory of the training's checkpoints")
    for method in ("state_dict", "load_state_dict"):
        if loader is not None and not hasattr(loader, method):
            raise TypeError(
                f"loader is a {type(loader).__name__} and has no {method}: use "
                "ffrecord.torch.DataLoader with a GlobalBatchSampler"
            )
    _refuse_single_checkpoint(ckpt_path)
    client.listen()
    if loader is not None and getattr(loader, "generator", False) is None:
        loader.generator = torch.Generator().manual_seed(torch.initial_seed() % 2**63)
    manager = CheckpointManager(ckpt_path, keep=keep, asynchronous=False, timeout=timeout)
    loaded = manager.resume(model, optimizer, scheduler, scaler=amp_scaler)
    number, epoch, step, others = 0, 0, 0, None
    if loaded is not None:
        number, epoch = loaded.step or 0, loaded.epoch or 0
        others = dict(loaded.others)
        own = others.pop(_OWN, None)
        if own is None:
            raise ValueError(f"{loaded.path} was not saved by try_save: give another ckpt_path")
        step = own["step"]
        if not own["has_others"]:
            others = None
        if loader is not None:
            _load_place(loader, own, loaded.per_rank, loaded.path)
    model.try_save = TrySave(  # type: ignore[assignment]
        manager, number, model, optimizer, scheduler, amp_scaler, loader, timeout
    )
    return epoch, step, others


class TrySave:
    """A model's `try_save`; see `init`."""

    def __init__(
        self,
        manager: CheckpointManager,
        number: int,
        model: nn.Module,
        optimizer: Any,
        scheduler: Any,
        scaler: Any,
        loader: Any,
        timeout: float,
    ) -> None:
        self._manager = manager
        self._number = number  # of the last checkpoint: they are counted, whatever the steps are
        self._model, self._optimizer = model, optimizer
        self._scheduler, self._scaler, self._loader = scheduler, scaler, loader
        self._timeout = timeout

    def __call__(
        self,
        epoch: int,
        step: int,
        others: Mapping[str, Any] | None = None,
        force: bool = False,
    ) -> bool:
        """Save if somebody has asked to suspend, and end the process; see `init`.

        Args:
            epoch: To go on with.
            step: Of that epoch, to go on with.
            others: Values to be given back by `init`.
            force: Save in any case; alike on all ranks.

        Raises:
            SystemExit: With the code 75, behind a save that was asked for.
            TimeoutError: A rank has not come to a step boundary.
            hfai.checkpoint.CheckpointError: It could not be saved; the one before is whole.
        """
        suspended = client.receive_suspend_command(self._timeout)
        if not suspended and not force:
            return False
        self._save(epoch, step, others)
        if suspended:
            client.go_suspend()
        return True

    def _save(self, epoch: int, step: int, others: Mapping[str, Any] | None) -> None:
        with self._manager._saver.failing_together():
            own, place = self._own(epoch, step, others)
        self._manager.save(
            self._number + 1,
            self._model,
            self._optimizer,
            self._scheduler,
            {**(others or {}), _OWN: own},
            scaler=self._scaler,
            epoch=epoch,
            per_rank={"loader": place},
        )
        self._number += 1

    def _own(
        self, epoch: int, step: int, others: Mapping[str, Any] | None
    ) -> tuple[dict[str, Any], Any]:
        """Return what is ours in the checkpoint, and this rank's place in the loader."""
        for name, value in (("epoch", epoch), ("step", step)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 0:
                raise ValueError(f"{name} is {value!r}: give a whole number, 0 or more")
        if others is not None and not isinstance(others, Mapping):
            raise TypeError(f"others is a {type(others).__name__}: give a dict of names and values")
        if others is not None and _OWN in others:
            raise ValueError(f"others has the name {_OWN!r}, which is taken: rename it")
        place = None if self._loader is None else self._loader.state_dict()
        ranks = torch.distributed.get_world_size() if _is_distributed() else 1
        own = {"step": step, "has_others": others is not None, "loader": place, "ranks": ranks}
        return own, place

    def __deepcopy__(self, memo: dict[int, Any]) -> TrySave:
        """Stay the same in a copy of the model, such as an average of its weights."""
        return self

    def __reduce__(self) -> tuple[Any, tuple[()]]:
        """Be gone from a pickled model: a file has no training to save."""
        return _Gone, ()


class _Gone:
    """What a model's `try_save` is in another process."""

    def __call__(self, *args: Any, **kwargs: Any) -> bool:
        raise RuntimeError(
            "this model was pickled, and its try_save stayed behind: call hfai.checkpoint.init"
        )


def _refuse_single_checkpoint(path: PathLike) -> None:
    if "://" not in os.fspath(path) and os.path.isfile(path):
        raise ValueError(
            f"ckpt_path {path} is a file: give a directory for the training's checkpoints"
        )
    if locate(path).is_committed():
        raise ValueError(
            f"ckpt_path {path} is a checkpoint itself: give a directory of its own for the "
            "training's checkpoints; hfai.checkpoint.load_into loads this one"
        )


def _load_place(loader: Any, own: dict[str, Any], per_rank: Any, path: str) -> None:
    """Let a loader go on at its place; on another number of ranks only if all ranks share it."""
    ranks = torch.distributed.get_world_size() if _is_distributed() else 1
    if own["loader"] is None:
        raise ValueError(f"{path} has no place of a loader: it was saved without loader=")
    if ranks == own["ranks"] and per_rank is not None:
        loader.load_state_dict(per_rank["loader"])
    elif _is_shared(loader):
        loader.load_state_dict(own["loader"])
    else:
        raise ValueError(
            f"{path} was saved by {own['ranks']} rank(s), and there are {ranks}: a "
            f"{type(loader).__name__} has a place for each rank; ffrecord.torch.DataLoader with a "
            "GlobalBatchSampler goes on with any number"
        )


def _is_shared(loader: Any) -> bool:
    """Whether a loader's place is the same on all ranks."""
    from ffrecord.torch import GlobalBatchSampler

    return isinstance(getattr(loader, "batch_sampler", loader), GlobalBatchSampler)


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
