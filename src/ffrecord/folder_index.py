"""The last record of a packed folder: nine letters and a pickle of nested dictionaries.

An OrderedDict maps a name to a record's index for a file, and to another OrderedDict for a
directory. The pickle is read by an unpickler that knows this one class, and what it makes is
checked, so that a file from anywhere may be opened.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, TypeAlias

from ffrecord.errors import DamagedFileError
from ffrecord.names import unsafe

MAGIC = b"piouhjgbr"

Tree: TypeAlias = "OrderedDict[str, int | Tree]"

# Deeper folders than this are refused: no file system has them, and Python could not walk them.
MOST_LEVELS = 200


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("collections", "OrderedDict"):
            return OrderedDict
        raise pickle.UnpicklingError(f"it asks for {module}.{name}")


def encode(tree: Tree) -> bytes:
    """Return the index record of a folder."""
    return MAGIC + pickle.dumps(tree)


def decode(record: bytes, n: int, path: str) -> Tree:
    """Read an index record.

    Args:
        record: The bytes of the last record.
        n: The number of records before it.
        path: The file, for messages.

    Raises:
        DamagedFileError: It is no index, asks for code, or names records or files that cannot be.
    """
    if not record.startswith(MAGIC):
        raise DamagedFileError(
            f"{path} is no packed folder: its last record is no index of names", path=path
        )
    try:
        tree = _Restricted(io.BytesIO(record[len(MAGIC) :])).load()
        _check(tree, n, 0)
    except DamagedFileError:
        raise
    # A pickle of nonsense may fail in nearly any way.
    except Exception as error:
        raise DamagedFileError(
            f"the index of {path} is damaged or unsafe: {error}", path=path
        ) from error
    found: Tree = tree
    return found


def _check(tree: Any, n: int, level: int) -> None:
    if type(tree) is not OrderedDict or level > MOST_LEVELS:
        raise ValueError("it is no tree of dictionaries")
    for name, value in tree.items():
        if type(name) is not str:
            raise ValueError(f"{name!r} is no name")
        if reason := unsafe(name):
            raise ValueError(f"the name {name!r} {reason}")
        if type(value) is not int:
            _check(value, n, level + 1)
        elif not 0 <= value < n:
            raise ValueError(f"{name!r} is record {value}, and there are {n}")


def walk(tree: Tree, prefix: str = "") -> Iterator[tuple[str, int | None]]:
    """Yield every path below a directory: with its record for a file, None for a directory."""
    for name, value in tree.items():
        if isinstance(value, int):
            yield prefix + name, value
        else:
            yield prefix + name, None
            yield from walk(value, f"{prefix}{name}/")


def paths(tree: Tree) -> list[str]:
    """Return every path in a tree, of directories too."""
    return [path for path, _ in walk(tree)]


def files(tree: Tree) -> list[str]:
    """Return the path of every file in a tree."""
    return [path for path, record in walk(tree) if record is not None]
