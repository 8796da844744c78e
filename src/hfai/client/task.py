"""What a task tells its scheduler besides suspending: a number that outlives it, and a time.

The original's scheduler kept both. Here the number lies in a file whose name the environment gives,
and nothing watches for silence.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from hfai.atomic import replacing

STATE_FILE_VARIABLE = "HFAI_WHOLE_LIFE_STATE_FILE"
STATE_VARIABLE = "MARSV2_WHOLE_LIFE_STATE"  # what the original's scheduler starts a task with
_LEAST, _MOST = -(2**31), 2**31 - 1

_log = logging.getLogger("hfai.client")
_state: int | None = None


def set_whole_life_state(state: int, timeout: float = 500, raise_exception: bool = True) -> bool:
    """Keep a number of 32 bits for the runs that come after this one is suspended.

    It is written to the file that HFAI_WHOLE_LIFE_STATE_FILE names, whole or not at all. Without
    that variable it is kept for this process only.

    Args:
        state: −2³¹ to 2³¹ − 1.
        timeout: Changes nothing; existing scripts pass it.
        raise_exception: Whether a file that cannot be written is an error.

    Returns:
        Whether later runs will find it.

    Raises:
        TypeError: `state` is no whole number.
        ValueError: It has more than 32 bits.
        OSError: The file cannot be written, and `raise_exception` is true.
    """
    global _state
    if not isinstance(state, int) or isinstance(state, bool):
        raise TypeError(f"state is {state!r}: give a whole number of 32 bits")
    if not _LEAST <= state <= _MOST:
        raise ValueError(f"state is {state}: give a number of 32 bits, {_LEAST} to {_MOST}")
    _state = state
    name = os.environ.get(STATE_FILE_VARIABLE)
    if not name:
        _log.info("the state is not kept for later runs: %s is not set", STATE_FILE_VARIABLE)
        return False
    try:
        with replacing(Path(name)) as file:
            file.write(f"{state}\n".encode())
    except OSError as error:
        if raise_exception:
            raise
        _log.warning("the state is not kept for later runs: %s", error)
        return False
    return True


def get_whole_life_state() -> int:
    """Return the number that this run or one before it has set last; 0 where none has.

    A run that has set none looks into the file that HFAI_WHOLE_LIFE_STATE_FILE names, and then at
    MARSV2_WHOLE_LIFE_STATE.

    Raises:
        OSError: The file is there and cannot be read.
        ValueError: It, or the variable, holds something else.
    """
    if _state is not None:
        return _state
    name = os.environ.get(STATE_FILE_VARIABLE)
    if name:
        try:
            text = Path(name).read_text()
        except FileNotFoundError:
            pass
        else:
            return _parsed(text, f"the file {name}")
    return _parsed(os.environ.get(STATE_VARIABLE) or "0", STATE_VARIABLE)


def set_watchdog_time(seconds: int) -> bool:
    """Accept how long a task may be silent before it counts as failed; nothing here watches.

    The original's scheduler did. It is accepted so that scripts run unchanged.

    Returns:
        False: no watchdog has been set.

    Raises:
        TypeError: `seconds` is no whole number.
        ValueError: It is not positive.
    """
    if not isinstance(seconds, int) or isinstance(seconds, bool):
        raise TypeError(f"seconds is {seconds!r}: give a whole number of seconds")
    if seconds < 1:
        raise ValueError(f"seconds is {seconds}: give at least 1")
    _log.info("no watchdog is here to wait %d s for output", seconds)
    return False


def _parsed(text: str, where: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{where} holds {text[:40]!r}, and no whole number") from None
