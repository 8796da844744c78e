"""Classes that torch derives from a layer's class behind the user's back, and how to tell them."""

from __future__ import annotations

from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP holds this module's parameters: its wrapper, or the class `fully_shard` made."""
    # By name: torch.distributed.fsdp takes long to import and not every build has it.
    return any(
        base.__module__.startswith("torch.distributed.fsdp") for base in type(module).__mro__
    )


def why_wrapped(module: nn.Module) -> str | None:
    """Return what gave the module a derived class, and what to do; None where nothing did."""
    if is_sharded(module):
        return "fully_shard came first: call to_hfai before it"
    if is_parametrized(module):
        return "it has a parametrization: call to_hfai before registering one"
    return None
