"""A check's answer, and the loop that asks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from typing import Literal

Status = Literal["ok", "missing", "broken"]


@dataclass(frozen=True)
class Check:
    """The state of one part.

    Attributes:
        name: of the part, as a user would call it.
        status: "ok", "missing" (not here, which may be all right) or "broken" (here, not working).
        detail: versions, paths, or what went wrong; one line.
        remedy: what to do about it; empty where nothing need be done.
        required: hfai is not usable without it on this machine.
    """

    name: str
    status: Status
    detail: str
    remedy: str = ""
    required: bool = False


def diagnose(
    checks: Iterable[Callable[[], Check]],
    on_error: Callable[[Exception], None] = lambda error: None,
) -> Iterator[Check]:
    """Run checks one by one; one that raises is itself a broken part.

    Args:
        checks: the functions to call.
        on_error: told each exception, for `--debug`.
    """
    for check in checks:
        try:
            yield check()
        except Exception as error:
            on_error(error)
            yield Check(
                name=check.__name__.replace("_", " "),
                status="broken",
                detail=one_line(error),
                remedy="run hfai doctor --debug and report what it prints",
                required=True,
            )


def all_ready(checks: Iterable[Check]) -> bool:
    """Say whether every required part is ready."""
    return all(check.status == "ok" for check in checks if check.required)


def with_version(package: str) -> str:
    """Return an installed package's name with its version, as far as its metadata tell."""
    try:
        return f"{package} {metadata.version(package)}"
    except metadata.PackageNotFoundError:
        return package


def one_line(error: BaseException) -> str:
    """Return an exception as one line, its type first."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
