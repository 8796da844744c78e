"""What all commands share: errors in one line, exit codes, options, progress, results.

Everything but click is imported where it is used, so that `ffrecord --help` answers at once. Data
go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ffrecord.reader import FileReader

EXIT_CODES = """\b
Exit codes:
  0    done
  1    a file is damaged, missing or cannot be written; a library is missing
  2    wrong arguments
  130  stopped by Ctrl-C; nothing half-written is left
"""


class Group(click.Group):
    """A group whose errors are one line on stderr."""

    def main(self, *args: Any, **kwargs: Any) -> Any:
        """Run the command and exit."""
        kwargs["standalone_mode"] = False
        try:
            code = super().main(*args, **kwargs)
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message())
            sys.exit(0)
        except click.ClickException as error:
            click.echo(f"ffrecord: {error.format_message()}", err=True)
            sys.exit(error.exit_code)
        except (click.Abort, KeyboardInterrupt):
            click.echo("ffrecord: stopped", err=True)
            sys.exit(130)
        except BrokenPipeError:
            # The reader of our output has seen enough; Python would complain while it flushes.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(0)
        except Exception as error:
            if _debug:
                raise
            click.echo(f"ffrecord: {_words(error)}", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


_debug = False


def _words(error: Exception) -> str:
    """Return an error in one line; those that nobody meant for a user say where to look."""
    if isinstance(error, OSError) and error.filename and error.strerror:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    text = str(error.args[0] if isinstance(error, KeyError) and error.args else error)
    line = " ".join(text.split())
    if isinstance(error, (OSError, RuntimeError, ValueError, LookupError, ImportError)) and line:
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
paths_argument = click.argument("paths", nargs=-1, required=True)


def open_reader(
    paths: tuple[str, ...], *, check_data: bool = True, engine: str = "auto"
) -> FileReader:
    """Open record files; warnings become lines on stderr."""
    from ffrecord.reader import FileReader

    with shown_warnings():
        return FileReader(paths[0] if len(paths) == 1 else paths, check_data, engine=engine)


@contextlib.contextmanager
def shown_warnings() -> Iterator[None]:
    """Print the warnings of a block, one line each, on stderr."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if issubclass(warning.category, UserWarning):
            click.echo(f"ffrecord: {warning.message}", err=True)


def print_result(result: dict[str, Any], as_json: bool) -> None:
    """Print what came out: one JSON object, or a line for each item."""
    if as_json:
        click.echo(json_module.dumps(result))
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        click.echo(f"{key.replace('_', ' '):<{width}}  {value}")


def need_new(out: str) -> None:
    """Refuse to replace what exists.

    Raises:
        click.UsageError: `out` exists.
    """
    if os.path.lexists(out):
        raise click.UsageError(f"{out} exists: remove it, or give another name")


def is_packed(reader: FileReader) -> bool:
    """Say whether the records are those of a packed folder."""
    from ffrecord.errors import DamagedFileError
    from ffrecord.folder_index import MAGIC

    try:
        return reader.n > 0 and reader.read_one(-1)[: len(MAGIC)].tobytes() == MAGIC
    except DamagedFileError:
        return False


def size_of(path: str) -> int:
    """Return the bytes of a file, or of all files below a directory."""
    found = Path(path)
    if found.is_dir():
        return sum(entry.stat().st_size for entry in found.rglob("*") if entry.is_file())
    return found.stat().st_size
