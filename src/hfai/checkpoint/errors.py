"""What can be wrong with a checkpoint, each kind an exception of its own."""

from __future__ import annotations

import errno

# What reading says of a medium or a file system that has lost bytes. All else (permissions, too
# many open files, no memory, a server that does not answer) may be gone at the next try.
_LOST = {getattr(errno, name) for name in ("EIO", "EBADMSG", "EUCLEAN") if hasattr(errno, name)}


class CheckpointError(RuntimeError):
    """A checkpoint cannot be written or read; the base of all errors here."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """Bytes of a checkpoint are not those that were written.

    Attributes:
        path: The file.
        tensor: Whose bytes they are; "" where they belong to none.
        offset: The first byte of the damaged chunk in the file; -1 where that is not known.
    """

    def __init__(self, message: str, *, path: str, tensor: str = "", offset: int = -1) -> None:
        super().__init__(message)
        self.path, self.tensor, self.offset = path, tensor, offset

    def __reduce__(self) -> tuple[object, ...]:
        return _damaged, (str(self), self.path, self.tensor, self.offset)


class NoCheckpointError(CheckpointError, FileNotFoundError):
    """There is no checkpoint, or one that was never finished."""


class RemovedCheckpointError(NoCheckpointError):
    """It was there, and was removed while it was read; by retention, say."""


class StateMismatchError(CheckpointError, ValueError):
    """A checkpoint holds other names, shapes or types than what it is to be loaded into."""


class UndecodableError(CheckpointError, ValueError):
    """A value has the bytes that were written, and this version cannot make it of them."""


def nested_too_deeply(what: str) -> CheckpointError:
    """Return the error of a reader that ran out of stack, which says nothing of the bytes."""
    return CheckpointError(
        f"{what} is nested too deeply for the calls that are open here: load it from fewer nested "
        "calls, or raise the limit (sys.setrecursionlimit)"
    )


def is_damage(error: Exception) -> bool:
    """Whether an error of reading says that a checkpoint is damaged or lacks files."""
    lost = (FileNotFoundError, NotADirectoryError, IsADirectoryError)  # stores give no errno
    if isinstance(error, (DamagedCheckpointError, NoCheckpointError, EOFError, *lost)):
        return True
    return isinstance(error, OSError) and error.errno in _LOST


def _damaged(message: str, path: str, tensor: str, offset: int) -> DamagedCheckpointError:
    return DamagedCheckpointError(message, path=path, tensor=tensor, offset=offset)
