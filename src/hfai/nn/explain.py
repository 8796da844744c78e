"""`hfai.explain(model)`: which layer takes which path, and why, as a table and as data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, overload

from torch import nn

from hfai.nn.path import Path
from hfai.nn.registry import OPERATORS, TORCH_CLASS, WHOLE, Explains
from hfai.nn.wrapped import why_wrapped


@dataclass(frozen=True)
class LayerPath:
    """One row: the layer's name in the model, its class, the path its calls take, the reason."""

    name: str
    layer: str
    path: str
    reason: str


class Explanation(Sequence[LayerPath]):
    """The rows of `explain`, in the model's order; `str()` and `print` give the table."""

    def __init__(self, rows: Sequence[LayerPath], others: int) -> None:
        self._rows = tuple(rows)
        self.others = others

    @overload
    def __getitem__(self, index: int) -> LayerPath: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[LayerPath]: ...
    def __getitem__(self, index: int | slice) -> LayerPath | Sequence[LayerPath]:
        return self._rows[index]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[LayerPath]:
        return iter(self._rows)

    def as_dicts(self) -> list[dict[str, Any]]:
        """Return the rows as plain dictionaries, ready for JSON."""
        return [asdict(row) for row in self._rows]

    def __str__(self) -> str:
        header = LayerPath("name", "layer", "path", "reason")
        table = [header, *self._rows]
        widths = [max(len(getattr(row, key)) for row in table) for key in ("name", "layer", "path")]
        lines = [
            f"{row.name:<{widths[0]}}  {row.layer:<{widths[1]}}  {row.path:<{widths[2]}}  "
            f"{row.reason}"
            for row in table
        ]
        if not self._rows:
            lines = []
        if self.others:
            layers = "layer" if self.others == 1 else "layers"
            lines.append(f"{self.others} other {layers}: torch, hfai has nothing faster for them")
        return "\n".join(lines) or "no layers"

    __repr__ = __str__


def explain(model: nn.Module) -> Explanation:
    """Say for each layer that hfai knows which path its calls take on this device, and why.

    Args:
        model: any module, converted or not.

    Returns:
        A sequence of `LayerPath` that prints as a table; `as_dicts()` gives it as data. Layers of
        classes that hfai has no operator for are only counted, in `others`.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"explain takes a torch.nn.Module, not {type(model).__name__}")
    rows = []
    others = 0
    parts: set[int] = set()
    for name, module in model.named_modules():
        if id(module) in parts:
            continue
        if isinstance(module, WHOLE):
            parts.update(map(id, module.modules()))
        path = _path_of(module)
        if path is not None:
            layer = type(module).__name__
            rows.append(LayerPath(name or "(the model itself)", layer, path.taken, path.reason))
        elif next(module.children(), None) is None:
            others += 1
    return Explanation(rows, others)


def why_left(module: nn.Module) -> str | None:
    """Return why `to_hfai` leaves this module alone, or None where that needs no explanation."""
    if type(module) in OPERATORS or isinstance(module, tuple(TORCH_CLASS)):
        return None
    for torch_class in OPERATORS:
        if isinstance(module, torch_class):
            reason = why_wrapped(module) or "only torch's exact class is swapped"
            return f"{_qualified(type(module))} is a subclass of {torch_class.__name__}; {reason}"
    return None


def _path_of(module: nn.Module) -> Path | None:
    if isinstance(module, Explains):
        if "forward" in vars(module):
            # Accelerate's hooks and some adapters put a function of their own on the instance.
            return Path("torch", "something replaced this layer's forward: call to_hfai before it")
        return module.explain_path()
    if type(module) in OPERATORS:
        return Path("torch", "not swapped: call hfai.nn.to_hfai(model)")
    reason = why_left(module)
    return None if reason is None else Path("torch", reason)


def _qualified(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
