"""The options of a collective, as torch gives them to a backend."""

from __future__ import annotations

from typing import Any


def options_of(kind: Any, given: Any) -> Any:
    """Return torch's options where it gave a bare operation or rank, as its overloads allow."""
    if isinstance(given, kind):
        return given
    options = kind()
    if given is None:
        return options
    if isinstance(given, int):
        options.rootRank = given
    else:
        options.reduceOp = given
    return options
