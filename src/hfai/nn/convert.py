"""`to_hfai` and `to_torch`: swap a model's layers for ours and back.

The swap changes `module.__class__` and nothing else. Parameters, buffers, hooks, the training flag,
names, sharing between modules and whatever an optimizer already holds therefore stay as they are.
Only modules whose type is exactly torch's are swapped: a subclass has reasons of its own.
"""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import TypeVar

from torch import nn

from hfai.nn import contiguous
from hfai.nn.explain import why_left
from hfai.nn.registry import OPERATORS, TORCH_CLASS

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def to_hfai(
    model: ModuleT,
    contiguous_param: bool = False,
    verbose: bool = False,
    inplace: bool = True,
) -> ModuleT:
    """Swap every layer that hfai has a faster class for.

    Idempotent, and undone by `to_torch`. Nothing outside `model` changes.

    Args:
        model: any module; it may itself be such a layer.
        contiguous_param: also move the parameters into one buffer for each dtype and device. The
            Parameter objects stay the same; their data become views of that buffer.
        verbose: print what was swapped, and what was left and why.
        inplace: convert `model` itself; False converts and returns a deep copy.

    Returns:
        The converted model: `model` itself unless `inplace` is False.

    Raises:
        TypeError: `model` is not an `nn.Module`.
        ValueError: `contiguous_param` with parameters that are shared, or that cannot be moved.
    """
    _require_module(model, "to_hfai")
    if not inplace:
        model = copy.deepcopy(model)
    if contiguous_param:
        contiguous.pack(model)
    swapped = _swap(model, OPERATORS)
    if verbose:
        print(_report(model, swapped))
    return model


def to_torch(model: ModuleT) -> ModuleT:
    """Undo `to_hfai` in place: every layer that it swapped is of torch's own class again.

    Parameters that `contiguous_param` packed get storage of their own again. A model that was never
    converted is returned untouched. A layer whose class was derived from hfai's after the swap (by
    a parametrization, `fully_shard` or a subclass of the user's) keeps it, and a warning names it.

    Args:
        model: any module.

    Returns:
        `model` itself.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    _require_module(model, "to_torch")
    _swap(model, TORCH_CLASS)
    contiguous.unpack(model)
    _warn_of_derived(model)
    return model


def _swap(model: nn.Module, replacement: dict[type[nn.Module], type[nn.Module]]) -> Counter[str]:
    """Change the class of every module whose exact type has a replacement; count them by name."""
    swapped: Counter[str] = Counter()
    for module in model.modules():
        new_class = replacement.get(type(module))
        if new_class is not None:
            module.__class__ = new_class
            swapped[new_class.__name__] += 1
    return swapped


def _warn_of_derived(model: nn.Module) -> None:
    """Name the layers that still run hfai's code because their class is not exactly hfai's."""
    derived = [
        f"{name or 'the model itself'} ({type(module).__name__})"
        for name, module in model.named_modules()
        if isinstance(module, tuple(TORCH_CLASS))
    ]
    if derived:
        warnings.warn(
            f"to_torch left {', '.join(derived)}: the class is derived from hfai's. Undo what "
            f"derived it (a parametrization, fully_shard, a subclass) and call to_torch again",
            stacklevel=3,
        )


def _report(model: nn.Module, swapped: Counter[str]) -> str:
    counts = ", ".join(f"{count} {name}" for name, count in sorted(swapped.items()))
    lines = [f"to_hfai: swapped {counts or 'nothing'}"]
    for name, module in model.named_modules():
        reason = why_left(module)
        if reason is not None:
            lines.append(f"  left {name or '(the model itself)'}: {reason}")
    return "\n".join(lines)


def _require_module(model: object, function: str) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{function} takes a torch.nn.Module, not {type(model).__name__}: "
            f"call it on the model before wrapping or compiling it into something else"
        )
