"""From and to other formats of training data: `convert(sources, target)`.

Each format is one file beside this one: a function that opens a source, and one that writes
entries to a target, which appears when it is complete. An entry is a record with or without a key.
Libraries are imported where a format is used. One side of a conversion is always a record file.

Names are imported on use, so that the command's help does not wait for numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffrecord.convert.formats import FORMATS
    from ffrecord.convert.model import Counts, Entry, Options, Source
    from ffrecord.convert.run import convert, plan

__all__ = ["FORMATS", "Counts", "Entry", "Options", "Source", "convert", "plan"]

_HOMES = {
    "FORMATS": "formats",
    "Counts": "model",
    "Entry": "model",
    "Options": "model",
    "Source": "model",
    "convert": "run",
    "plan": "run",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
