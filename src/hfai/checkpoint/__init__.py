"""Checkpoints that are whole or refused: saved by all ranks at once, loaded onto any number.

    from hfai import checkpoint

    checkpoint.save("runs/a", model, optimizer, scheduler, others={"epoch": 3})
    loaded = checkpoint.load_into("runs/a", model, optimizer, scheduler)

See docs/checkpoint.md. Names are imported when they are used, so that the command line need not
wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfai.checkpoint.api import load, load_tensor, save, save_async
    from hfai.checkpoint.errors import (
        CheckpointError,
        DamagedCheckpointError,
        NoCheckpointError,
        StateMismatchError,
    )
    from hfai.checkpoint.handle import SaveHandle
    from hfai.checkpoint.loading import Loaded, load_into
    from hfai.checkpoint.manager import CheckpointManager
    from hfai.checkpoint.preparing import prepare
    from hfai.checkpoint.staging import HostPool
    from hfai.checkpoint.suspendable import init

_HOMES = {
    "CheckpointError": "errors",
    "CheckpointManager": "manager",
    "DamagedCheckpointError": "errors",
    "HostPool": "staging",
    "Loaded": "loading",
    "NoCheckpointError": "errors",
    "SaveHandle": "handle",
    "StateMismatchError": "errors",
    "init": "suspendable",
    "load": "api",
    "load_into": "loading",
    "load_tensor": "api",
    "prepare": "preparing",
    "save": "api",
    "save_async": "api",
}
__all__ = [
    "CheckpointError",
    "CheckpointManager",
    "DamagedCheckpointError",
    "HostPool",
    "Loaded",
    "NoCheckpointError",
    "SaveHandle",
    "StateMismatchError",
    "init",
    "load",
    "load_into",
    "load_tensor",
    "prepare",
    "save",
    "save_async",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hfai.checkpoint.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hfai.checkpoint' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
