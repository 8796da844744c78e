"""What the command line hands to the job, and what comes back.

Nothing here imports torch, which takes seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

EXIT_DONE, EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 0, 1, 2, 130


class UsageError(ValueError):
    """The user asked for something that cannot be done as asked."""


class HelperError(RuntimeError):
    """Another process of the training died or did not come."""


@dataclass(frozen=True)
class Request:
    """What the command line asked for.

    Attributes:
        given: values for fields of `Settings`; None or "auto" where the user left it open.
        device: "auto", "cpu" or "cuda".
        out: the directory of all files written.
        nprocs: processes that train together on this machine.
        resume: go on with the run whose checkpoint is in `out`.
        suspend_after: the step after which the run asks itself to suspend, or None.
        json: print the figures as JSON on standard output, all else on standard error.
        command: as the user would type it again.
    """

    given: dict[str, Any]
    device: str
    out: Path
    nprocs: int
    resume: bool
    suspend_after: int | None
    json: bool
    command: str
