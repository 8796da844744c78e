"""hfai: PyTorch training, faster on the hardware you have, one line at a time.

Importing this package imports nothing else: `hfai.checkpoint`, `hfai.nn`, `hfai.models`,
`hfai.multiprocessing` and `hfai.explain` are loaded when they are first used, so that `hfai --help`
need not wait for torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hfai import checkpoint, models, multiprocessing, nn
    from hfai.nn.explain import explain

__version__ = "0.1.0"
__all__ = ["__version__", "checkpoint", "explain", "models", "multiprocessing", "nn"]


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "models", "multiprocessing", "nn"):
        return importlib.import_module(f"hfai.{name}")
    if name == "explain":
        return importlib.import_module("hfai.nn.explain").explain
    raise AttributeError(f"module 'hfai' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
