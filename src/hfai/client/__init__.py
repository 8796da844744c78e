"""What a training script says to whoever runs it: suspend in good order, and be started again.

`suspend.py` has the two calls that a script makes. Below it: `listener.py` (what this process
hears), `agreement.py` (when all ranks stop), `workers.py` (processes that must not hear). `task.py`
has the other calls that scripts of the original make.
"""

from hfai.client.suspend import (
    EXIT_SUSPENDED,
    go_suspend,
    heard,
    listen,
    receive_suspend_command,
    stop_listening,
)
from hfai.client.task import get_whole_life_state, set_watchdog_time, set_whole_life_state
from hfai.client.workers import ignore_in_worker

__all__ = [
    "EXIT_SUSPENDED",
    "get_whole_life_state",
    "go_suspend",
    "heard",
    "ignore_in_worker",
    "listen",
    "receive_suspend_command",
    "set_watchdog_time",
    "set_whole_life_state",
    "stop_listening",
]
