"""Going on from the newest checkpoint of a directory that is whole, on all ranks the same.

Each rank loads, tells the others how that went, and waits for what they say; if any of them met
damage, all go on to the checkpoint before. Keys of the group's store, behind the resumption's own:

    L/steps         rank 0's: what there is, at the Lth look
    L/N/check/RANK  of the Nth checkpoint that is tried: "", or what was wrong when it was compared
    L/N/RANK        likewise, when it was loaded
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from hfai.checkpoint.errors import (
    CheckpointError,
    NoCheckpointError,
    UndecodableError,
    is_damage,
)
from hfai.checkpoint.loading import Loaded, check_into, load_into
from hfai.checkpoint.peers import Peers
from hfai.checkpoint.retention import step_name, step_of, steps_of
from hfai.checkpoint.storage import Location

_T = TypeVar("_T")
# Kinds of failures behind which an earlier checkpoint is taken.
_PASSED_OVER = {"damage": "it is damaged", "coding": "its values cannot be decoded"}
_MOST_LISTS = 10  # how often is looked for what is there, when checkpoints go while they are read


class Resumption:
    """One `resume` of a manager; see there.

    Args:
        location: The directory of checkpoints.
        peers: The ranks.
        key: What its keys begin with; new each time.

    Attributes:
        step: That was loaded.
    """

    def __init__(self, location: Location, peers: Peers, key: str) -> None:
        self._location, self._peers, self._key = location, peers, key
        self.step = -1

    def run(
        self,
        step: int | None,
        fallback: bool,
        progress: Callable[[int], object] | None,
        given: dict[str, Any],
    ) -> Loaded | None:
        """Load; `given` is for `load_into`, and for `check_into`, which compares and keeps nothing.

        Raises:
            CheckpointError: See `CheckpointManager.resume`.
        """
        for number in range(_MOST_LISTS):
            steps = self._agree_on_steps(f"{number}/steps", step)
            try:
                return self._newest(str(number), steps, fallback, progress, given)
            except NoCheckpointError:
                # Retention of a training that goes on has removed it; then there is a newer one.
                if number == _MOST_LISTS - 1:
                    raise
        raise AssertionError("unreachable")

    def _newest(
        self,
        key: str,
        steps: list[int],
        fallback: bool,
        progress: Callable[[int], object] | None,
        given: dict[str, Any],
    ) -> Loaded | None:
        last: Exception | None = None
        for number, one in enumerate(reversed(steps)):
            location = self._location.child(step_name(one))
            failure, error = None, None
            # Whatever an earlier checkpoint does not have keeps what this one is read into.
            if not given["strict"] and fallback and number + 1 < len(steps):
                _, error = _caught(functools.partial(check_into, location, **given))
                failure = self._worst(f"{key}/{number}/check", error)
            if failure is None:
                load = functools.partial(load_into, location, progress=progress, **given)
                loaded, error = _caught(load)
                failure = self._worst(f"{key}/{number}", error)
                if failure is None:
                    self.step = one
                    return loaded
            if error is not None and _kind(error) == "other":
                raise error
            kind, text = failure
            if kind == "gone":
                raise NoCheckpointError(text)
            if kind not in _PASSED_OVER:
                raise CheckpointError(f"resuming from {location.path} failed on {text}")
            last = error or CheckpointError(text)
            if not fallback:
                raise last
            if self._peers.rank == 0 or error is not None:
                warnings.warn(
                    f"{location.path} is not used, because {_PASSED_OVER[kind]}: {text}",
                    stacklevel=4,
                )
        if last is not None:
            raise last
        return None

    def _agree_on_steps(self, key: str, step: int | None) -> list[int]:
        """Return the steps to try, as rank 0 sees them."""
        key = f"{self._key}/{key}"
        if self._peers.rank == 0:
            found = steps_of(self._location.children())
            self._warn_of_unfinished(found)
            self._peers.set(key, ",".join(map(str, found)).encode())
        else:
            text = self._peers.wait([key], "resume")[0].decode()
            found = [int(one) for one in text.split(",") if one]
        if step is None:
            return found
        if step not in found:
            raise NoCheckpointError(
                f"{self._location.path} has no checkpoint of step {step}: there are "
                f"{', '.join(map(str, found)) or 'none'}"
            )
        return [one for one in found if one <= step]

    def _warn_of_unfinished(self, steps: list[int]) -> None:
        """Name what would be the newest checkpoint if its commit record were there."""
        for name in self._location.unfinished():
            step = step_of(name)
            if step is not None and step > max(steps, default=-1):
                warnings.warn(
                    f"{self._location.child(name).path} is not used: its COMMIT file is missing, "
                    "which no save leaves so; put that back, remove the directory, or save the "
                    "step again",
                    stacklevel=5,
                )

    def _worst(self, key: str, error: Exception | None) -> tuple[str, str] | None:
        """Tell the others how loading went; return the first failure, its kind and text."""
        peers, key = self._peers, f"{self._key}/{key}"
        said = b""
        if error is not None:
            said = f"{_kind(error)} rank {peers.rank}: {error}".encode()
        peers.set(f"{key}/{peers.rank}", said)
        found = peers.wait([f"{key}/{rank}" for rank in range(peers.world)], "resume")
        # By kind: other, gone, damage, coding. Damage that one sees may be the removal that another
        # sees.
        failures = sorted((text.decode() for text in found if text), reverse=True)
        if not failures:
            return None
        kind, _, text = failures[0].partition(" ")
        return kind, text


def _kind(error: Exception) -> str:
    if isinstance(error, NoCheckpointError):
        return "gone"
    if isinstance(error, UndecodableError):
        return "coding"
    return "damage" if is_damage(error) else "other"


def _caught(load: Callable[[], _T]) -> tuple[_T | None, Exception | None]:
    try:
        return load(), None
    except Exception as error:
        return None, error
