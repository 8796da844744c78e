"""Saves that run in the background of this process, by path: whoever is called last must stay."""

from __future__ import annotations

import os
import threading

from hfai.checkpoint.handle import SaveHandle
from hfai.checkpoint.storage import Location

Place = tuple[int, str]
_lock = threading.Lock()
_handles: dict[Place, SaveHandle] = {}


def place_of(location: Location) -> Place:
    """Return what saves of one path have in common; a forked child has none of its parent's."""
    path = location.path
    return os.getpid(), path if "://" in path else os.path.realpath(path)


def begin(place: Place, handle: SaveHandle) -> None:
    """Note a save that begins."""
    with _lock:
        _handles[place] = handle


def end(place: Place, handle: SaveHandle) -> None:
    """Note that a save has ended."""
    with _lock:
        if _handles.get(place) is handle:
            del _handles[place]


def wait(place: Place) -> None:
    """Wait for the save that runs there, if one does."""
    with _lock:
        handle = _handles.get(place)
    if handle is not None:
        handle._done.wait()
