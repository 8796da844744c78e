"""Record files that random batches are read from at the disk's own speed.

Names are imported on use, so that `ffrecord --help` does not wait for numpy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ffrecord.engines import explain
    from ffrecord.errors import DamagedFileError, HeaderError, RecordError, RecordWarning
    from ffrecord.folder import NameWarning, PackedFolder, pack_folder, unpack
    from ffrecord.parts import PartWriter
    from ffrecord.reader import FileReader
    from ffrecord.store_options import StoreOptions
    from ffrecord.writer import FileWriter

__version__ = "0.1.0"

__all__ = [
    "DamagedFileError",
    "FileReader",
    "FileWriter",
    "HeaderError",
    "NameWarning",
    "PackedFolder",
    "PartWriter",
    "RecordError",
    "RecordWarning",
    "StoreOptions",
    "explain",
    "pack_folder",
    "unpack",
]

_HOMES = {
    "DamagedFileError": "errors",
    "FileReader": "reader",
    "FileWriter": "writer",
    "HeaderError": "errors",
    "NameWarning": "folder",
    "PackedFolder": "folder",
    "PartWriter": "parts",
    "RecordError": "errors",
    "RecordWarning": "errors",
    "StoreOptions": "store_options",
    "explain": "engines",
    "pack_folder": "folder",
    "unpack": "folder",
}


def __getattr__(name: str) -> Any:
    if name in ("torch", "utils"):
        return importlib.import_module(f"ffrecord.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"ffrecord.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
