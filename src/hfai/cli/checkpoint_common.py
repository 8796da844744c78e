"""What the commands of `hfai checkpoint` share: errors in one line, options, progress, words."""

from __future__ import annotations

import os
import sys
import threading
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from collections.abc import Callable

    from ffrecord.cli.progress import Progress
    from hfai.checkpoint.storage import Location

_MIB = 1 << 20
_debug = False


class Group(click.Group):
    """A group whose errors are one line on stderr."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (click.ClickException, click.exceptions.Exit, click.Abort):
            raise
        except BrokenPipeError:
            # The reader of our output has seen enough; Python would complain while it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            ctx.exit(0)
        except KeyboardInterrupt:
            click.echo("hfai checkpoint: stopped", err=True)
            ctx.exit(130)
        except Exception as error:
            if _debug:
                raise
            click.echo(f"hfai checkpoint: {_words(error)}", err=True)
            ctx.exit(1)


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    line = " ".join(str(error).split())
    if line and isinstance(error, (OSError, RuntimeError, ValueError, LookupError, ImportError)):
        return line
    return f"{type(error).__name__}: {line} (add --debug for the traceback)"


def _set_debug(context: click.Context, option: click.Parameter, value: bool) -> None:
    global _debug
    _debug = value or _debug


debug_option = click.option(
    "--debug",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_set_debug,
    help="Show the traceback of an error.",
)
json_option = click.option("--json", is_flag=True, help="Print one JSON object, and only that.")


def advance(progress: Progress) -> Callable[[int], None]:
    """Return what counts bytes from several threads and shows MiB."""
    lock, rest = threading.Lock(), 0

    def advance(count: int) -> None:
        nonlocal rest
        with lock:
            done, rest = divmod(rest + count, _MIB)
            if done:
                progress(done)

    return advance


def progress_of(what: str, total: int | None) -> Progress:
    """Return what shows how far a command is, of so many bytes; None: not known."""
    from ffrecord.cli.progress import Progress

    mib = None if total is None else max(1, total // _MIB)
    return Progress(f"{what} (MiB)", mib, program="hfai checkpoint")


def summary(location: Location) -> dict[str, Any]:
    """Return what a checkpoint's commit record says."""
    from hfai.checkpoint.contents import CheckpointFiles

    with CheckpointFiles(location) as files:
        commit = files.commit
        there = files.location.files()
        return {
            "path": files.path,
            "step": commit.step,
            "epoch": commit.epoch,
            "created": commit.created,
            "ranks": commit.world,
            "files": len(commit.files) + 1,
            "bytes": sum(size for size, _ in commit.files.values()),
            "versions": dict(commit.versions),
            "lacking": [
                f"{name} is missing"
                if name not in there
                else f"{name} has {there[name]} of {size} bytes"
                for name, (size, _) in sorted(commit.files.items())
                if there.get(name) != size
            ],
        }


def printable(text: str) -> str:
    """Return a text whose control characters, and what else has no glyph, are escaped.

    Names come from files, and must neither make lines of their own nor command the terminal.
    """
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode() for one in text
    )


def exists(location: Location) -> bool:
    """Whether a directory is there."""
    try:
        location.files()
    except OSError:
        return False
    return True


def size_text(count: Any) -> str:
    """Return a number of bytes for people."""
    size = float(count)
    for unit in ("B", "KB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} TB"
