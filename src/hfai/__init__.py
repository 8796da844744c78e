"""hfai: PyTorch training, faster on the hardware you have, one line at a time.

Importing this package imports nothing else: `hfai.checkpoint`, `hfai.client`, `hfai.models`,
`hfai.multiprocessing`, `hfai.nn` and `hfai.explain` are loaded when they are first used, so that
`hfai --help` need not wait for torch. The calls of `hfai.client` that scripts make most go by
`hfai.` as well.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfai import checkpoint, client, models, multiprocessing, nn
    from hfai.client import (
        get_whole_life_state,
        go_suspend,
        receive_suspend_command,
        set_watchdog_time,
        set_whole_life_state,
    )
    from hfai.nn.explain import explain

__version__ = "0.1.0"
__all__ = [
    "__version__",
    "checkpoint",
    "client",
    "explain",
    "get_whole_life_state",
    "go_suspend",
    "models",
    "multiprocessing",
    "nn",
    "receive_suspend_command",
    "set_watchdog_time",
    "set_whole_life_state",
]
_OF_CLIENT = (
    "get_whole_life_state",
    "go_suspend",
    "receive_suspend_command",
    "set_watchdog_time",
    "set_whole_life_state",
)


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "client", "models", "multiprocessing", "nn"):
        return importlib.import_module(f"hfai.{name}")
    if name in _OF_CLIENT:
        return getattr(importlib.import_module("hfai.client"), name)
    if name == "explain":
        return importlib.import_module("hfai.nn.explain").explain
    raise AttributeError(f"module 'hfai' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
