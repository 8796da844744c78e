"""What torch.jit.script and torch.fx meet in place of a swapped layer: torch's own.

Both take torch's layers as they are: the first compiles their Python, the second records them as
one node each, by the module they live in. A class of ours is neither, so its layer steps aside.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
import torch.fx
from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)
MethodT = TypeVar("MethodT", bound=Callable[..., Any])


def as_torch(module: nn.Module, torch_class: type[ModuleT]) -> ModuleT:
    """Return torch's layer around the same parameters, hooks and options."""
    plain = torch_class.__new__(torch_class)
    plain.__dict__ = module.__dict__.copy()
    return plain


def as_method(forward: MethodT, name: str) -> MethodT:
    """Return torch's `forward` under another name, as a method that TorchScript can compile.

    TorchScript compiles a layer's forward and the methods that it calls; a class of ours that calls
    this one under `is_scripting` needs no stand-in, and the model that is scripted stays as it is
    (what `__prepare_scriptable__` returns is put into the model itself).
    """
    assert isinstance(forward, FunctionType)
    copied = FunctionType(
        forward.__code__, forward.__globals__, name, forward.__defaults__, forward.__closure__
    )
    copied.__kwdefaults__ = forward.__kwdefaults__
    copied.__annotations__ = forward.__annotations__
    copied.__module__ = forward.__module__
    return cast(MethodT, copied)


def as_leaf(module: nn.Module, *arguments: Any, **keywords: Any) -> Any:
    """Record the layer as one node of torch.fx's graph, as it does with torch's own layers.

    Args:
        module: the layer.
        *arguments: of the call; a None at their end is left out.
        **keywords: of the call. A proxy is among all these (`proxy_among`).
    """
    if arguments[-1] is None:
        arguments = arguments[:-1]
    proxy = proxy_among(*arguments, *keywords.values())
    assert proxy is not None
    tracer: Any = proxy.tracer
    path = tracer.path_of_module(module)
    return tracer.create_proxy("call_module", path, arguments, keywords)


def proxy_among(*arguments: Any) -> torch.fx.Proxy | None:
    """Return the first of torch.fx's proxies among a call's arguments and their members."""
    for argument in arguments:
        if isinstance(argument, torch.fx.Proxy):
            return argument
        if isinstance(argument, (tuple, list)):
            proxy = proxy_among(*argument)
            if proxy is not None:
                return proxy
    return None


_eval_frame_callback = torch._C._dynamo.eval_frame.get_eval_frame_callback


def is_compiling() -> bool:
    """Return whether torch.compile is at work, be it on frames that this one calls or backward.

    Dynamo skips the frame of a recurrent layer's forward, and compiles the functions called from it
    one by one: there `torch.compiler.is_compiling` says no. Compiled autograd traces what nodes do.
    """
    # Asked first: while dynamo reads this very code, the other questions have no meaning.
    if torch.compiler.is_compiling() or _eval_frame_callback() not in (None, False):
        return True
    compiled_autograd = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(compiled_autograd, "compiled_autograd_enabled", False))
