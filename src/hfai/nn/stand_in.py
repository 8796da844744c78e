"""What torch.jit.script and torch.fx meet in place of a swapped layer: torch's own.

Both take torch's layers as they are: the first compiles their Python, the second records them as
one node each, by the module they live in. A class of ours is neither, so its layer steps aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def as_torch(module: nn.Module, torch_class: type[ModuleT]) -> ModuleT:
    """Return torch's layer around the same parameters, hooks and options."""
    plain = torch_class.__new__(torch_class)
    plain.__dict__ = module.__dict__.copy()
    return plain


def as_leaf(
    module: nn.Module,
    proxy: torch.fx.Proxy,
    arguments: tuple[Any, ...],
    keywords: Mapping[str, Any] | None = None,
) -> Any:
    """Record the layer as one node of torch.fx's graph, as it does with torch's own layers."""
    tracer = proxy.tracer
    path = tracer.path_of_module(module)  # type: ignore[attr-defined]
    return tracer.create_proxy("call_module", path, arguments, dict(keywords or {}))
