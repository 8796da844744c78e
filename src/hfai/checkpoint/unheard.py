"""Saves that failed in the background, and of which nobody has asked yet.

The next save of the same ranks raises what went wrong. What is left when the interpreter ends is
said on stderr, one line for each; the exit code stays the script's own, for an exit handler cannot
change it without cutting off those behind it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hfai.checkpoint.handle import SaveHandle

# Stands in errors that only say once more what another rank has not asked for.
AGAIN = "failed in the background, and so this one was not begun"
_lock = threading.Lock()
_failed: dict[int, tuple[int, SaveHandle, str]] = {}  # process and error, by the handle's identity
_registered = False


def note(handle: SaveHandle, error: BaseException) -> None:
    """Remember a save that has failed."""
    if AGAIN in str(error):
        return
    with _lock:
        _failed[id(handle)] = os.getpid(), handle, " ".join(str(error).split())


def forget(handle: SaveHandle) -> bool:
    """Forget a save, because its error is told; whether it had failed and was not asked for."""
    with _lock:
        found = _failed.pop(id(handle), None)
    return found is not None


def watch_exit() -> None:
    """See that what is left is said at the end."""
    global _registered
    with _lock:
        if not _registered:
            _registered = True
            atexit.register(_say)


def _say() -> None:
    with _lock:
        left = [(handle, text) for pid, handle, text in _failed.values() if pid == os.getpid()]
    for handle, text in left:
        print(f"hfai: {handle.path} was not saved: {text}", file=sys.stderr, flush=True)
