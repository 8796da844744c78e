"""The `ffrecord` command.

Everything but click is imported where it is used, so that `ffrecord --help` answers at once. Data
go to stdout, progress and errors to stderr.
"""

from __future__ import annotations

import contextlib
import json as json_module
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ffrecord import __version__

if TYPE_CHECKING:
    from ffrecord.reader import FileReader

EXIT_CODES = """\b
Exit codes:
  0    done
  1    a file is damaged, missing or cannot be written
  2    wrong arguments
  130  stopped by Ctrl-C; nothing half-written is left
"""

Advance = Callable[[int], object]


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
        except (OSError, RuntimeError, ValueError, LookupError) as error:
            if _debug:
                raise
            click.echo(f"ffrecord: {_words(error)}", err=True)
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)


_debug = False


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return str(error.args[0] if isinstance(error, KeyError) and error.args else error)


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


@click.group(cls=Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ffrecord")
@debug_option
def main() -> None:
    """Look into record files (.ffr), check them, and make new ones.

    PATHS are record files or one directory of them, read as one run of records.
    """


def _open(paths: tuple[str, ...], *, check_data: bool = True) -> FileReader:
    import warnings

    from ffrecord.reader import FileReader

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reader = FileReader(paths[0] if len(paths) == 1 else paths, check_data)
    for warning in caught:
        click.echo(f"ffrecord: {warning.message}", err=True)
    return reader


@contextlib.contextmanager
def _progress(what: str, total: int) -> Iterator[Advance]:
    """Show a bar on a terminal."""
    if not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda count: bar.advance(task, count)


def _print(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json_module.dumps(result))
        return
    width = max(len(key) for key in result)
    for key, value in result.items():
        click.echo(f"{key.replace('_', ' '):<{width}}  {value}")


paths_argument = click.argument("paths", nargs=-1, required=True)


@main.command()
@paths_argument
@json_option
@debug_option
def info(paths: tuple[str, ...], json: bool) -> None:
    """Say what PATHS hold: records, files, bytes, sizes."""
    import numpy as np

    with _open(paths) as reader:
        smallest, largest, total, gap = None, 0, 0, 0
        for number in range(len(reader.fnames)):
            offsets = reader.get_offsets(number)
            if len(offsets) == 1:
                continue
            lengths = np.diff(offsets)
            low = int(lengths.min())
            smallest = low if smallest is None else min(smallest, low)
            largest = max(largest, int(lengths.max()))
            total += int(lengths.sum())
            gap += int(offsets[0]) - 12 * len(offsets)
        _print(
            {
                "records": reader.n,
                "files": len(reader.fnames),
                "bytes_in_records": total,
                "bytes_in_gaps": gap,
                "smallest_record": smallest or 0,
                "mean_record": round(total / reader.n, 1) if reader.n else 0,
                "largest_record": largest,
                "packed_folder": _is_packed(reader),
                "keys": sum(len(reader.get_keys(k)) for k in range(len(reader.fnames))),
                "metadata": reader.get_metadata(0),
                "schema": reader.get_schema(0),
            },
            json,
        )


def _is_packed(reader: FileReader) -> bool:
    from ffrecord.errors import DamagedFileError
    from ffrecord.folder_index import MAGIC

    try:
        return reader.n > 0 and reader.read_one(-1)[: len(MAGIC)].tobytes() == MAGIC
    except DamagedFileError:
        return False


@main.command()
@paths_argument
@click.option("--names", is_flag=True, help="The paths in a packed folder.")
@click.option("--start", type=int, default=0, show_default=True, help="The first record.")
@click.option("--stop", type=int, help="The record before which to stop.  [default: the end]")
@json_option
@debug_option
def ls(paths: tuple[str, ...], names: bool, start: int, stop: int | None, json: bool) -> None:
    """List records: index, length, checksum, offset, file. With --json one object a line."""
    if names:
        from ffrecord.folder import PackedFolder

        with PackedFolder(_only(paths)) as packed:
            for name in packed.list(recursive=True):
                kind = "file" if packed.is_file(name) else "directory"
                click.echo(json_module.dumps({"name": name, "kind": kind}) if json else name)
        return
    with _open(paths) as reader:
        first, last, _ = slice(start, stop).indices(reader.n)
        base = 0
        for number, name in enumerate(reader.fnames):
            offsets = reader.get_offsets(number)
            sums = reader.get_checksums(number)
            for local in range(max(0, first - base), min(len(sums), last - base)):
                row = {
                    "index": base + local,
                    "length": int(offsets[local + 1] - offsets[local]),
                    "checksum": f"{int(sums[local]):08x}",
                    "offset": int(offsets[local]),
                    "file": name,
                }
                text = "\t".join(str(value) for value in row.values())
                click.echo(json_module.dumps(row) if json else text)
            base += len(sums)


def _only(paths: tuple[str, ...]) -> str:
    if len(paths) != 1:
        raise click.UsageError(f"a packed folder is one file, not {len(paths)}")
    return paths[0]


@main.command()
@click.argument("path")
@click.argument("which", nargs=-1, required=True)
@click.option("--names", is_flag=True, help="WHICH are paths in a packed folder.")
@debug_option
def cat(path: str, which: tuple[str, ...], names: bool) -> None:
    """Write records to stdout, one after the other. A negative WHICH (after --) is from the end."""
    if names:
        from ffrecord.folder import PackedFolder

        packed = PackedFolder(path)
        read: Callable[[str], Any] = packed.read_one
    else:
        reader = _open((path,))

        def read(text: str) -> Any:
            try:
                return reader.read_one(int(text))
            except ValueError:
                raise click.BadParameter(f"{text} is not the index of a record") from None

    for item in which:
        sys.stdout.buffer.write(read(item).data)
    sys.stdout.buffer.flush()


@main.command()
@paths_argument
@click.option("--headers", is_flag=True, help="Only headers: seconds instead of a full read.")
@json_option
@debug_option
def verify(paths: tuple[str, ...], headers: bool, json: bool) -> int:
    """Check headers and every record; name each damaged one. Exits with 1 if there is any."""
    with _open(paths) as reader:
        reader.validate()
        found = []
        if not headers:
            with _progress("verify", reader.n) as advance:
                for first, last in reader.pieces():
                    for error in reader.damaged(first, last):
                        found.append(error)
                        if not json:
                            click.echo(str(error), err=True)
                    advance(last - first)
        result = {"records": reader.n, "checked": 0 if headers else reader.n, "damaged": len(found)}
        if json:
            keys = ("index", "path", "offset", "expected", "found")
            rows = [{key: getattr(error, key) for key in keys} for error in found]
            click.echo(json_module.dumps({**result, "errors": rows}))
        else:
            _print(result, False)
    return 1 if found else 0


@main.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.argument("out")
@json_option
@debug_option
def pack(folder: str, out: str, json: bool) -> None:
    """Pack the files of FOLDER into the record file OUT."""
    from ffrecord.folder import PackedFolder, pack_folder

    _need_new(out)
    total = sum(len(files) for _, _, files in os.walk(folder))
    with _progress("pack", total) as advance, _named_warnings():
        pack_folder(folder, out, progress=advance)
    with PackedFolder(out) as packed:
        _print({"files": packed.num_files(), "bytes": os.path.getsize(out)}, json)


@main.command()
@click.argument("path")
@click.argument("folder")
@json_option
@debug_option
def unpack(path: str, folder: str, json: bool) -> None:
    """Write the files of the packed folder PATH into the new directory FOLDER."""
    from ffrecord.folder import PackedFolder
    from ffrecord.folder import unpack as unpack_folder

    with PackedFolder(path) as packed:
        total = packed.num_files()
    with _progress("unpack", total) as advance, _named_warnings():
        unpack_folder(path, folder, progress=advance)
    _print({"files": total}, json)


@contextlib.contextmanager
def _named_warnings() -> Iterator[None]:
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    for warning in caught:
        click.echo(f"ffrecord: {warning.message}", err=True)


def _need_new(out: str) -> None:
    if Path(out).exists():
        raise click.UsageError(f"{out} exists: remove it, or give another name")


def _copy(reader: FileReader, ranges: Iterator[tuple[int, int]], out: str, advance: Advance) -> int:
    """Write runs of records into one file; return how many."""
    from ffrecord.writer import FileWriter

    with FileWriter(out) as writer:
        for first, last in ranges:
            writer.write(reader.read(range(first, last)))
            advance(last - first)
        return writer.count


@main.command()
@click.argument("out")
@paths_argument
@json_option
@debug_option
def merge(out: str, paths: tuple[str, ...], json: bool) -> None:
    """Write all records of PATHS, in order, into the new file OUT."""
    _need_new(out)
    with _open(paths) as reader, _progress("merge", reader.n) as advance:
        count = _copy(reader, reader.pieces(), out, advance)
    _print({"records": count, "bytes": os.path.getsize(out)}, json)


@main.command()
@click.argument("out")
@paths_argument
@click.option("--files", type=click.IntRange(1, 99_999), required=True, help="How many parts.")
@json_option
@debug_option
def split(out: str, paths: tuple[str, ...], files: int, json: bool) -> None:
    """Spread the records of PATHS, in order, over parts in the new directory OUT."""
    from ffrecord.whole import whole_directory

    _need_new(out)
    with _open(paths) as reader:
        each = max(1, -(-reader.n // files))
        starts = range(0, max(reader.n, 1), each)
        with whole_directory(Path(out)) as work, _progress("split", reader.n) as advance:
            for number, start in enumerate(starts):
                stop = min(start + each, reader.n)
                step = 256
                ranges = ((at, min(at + step, stop)) for at in range(start, stop, step))
                _copy(reader, ranges, str(work / f"PART_{number:05d}.ffr"), advance)
        _print({"records": reader.n, "files": len(starts), "records_a_file": each}, json)


@main.command()
@click.argument("out")
@paths_argument
@click.option("-n", "--count", type=click.IntRange(0), required=True, help="How many records.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice.")
@json_option
@debug_option
def sample(out: str, paths: tuple[str, ...], count: int, seed: int, json: bool) -> None:
    """Write COUNT records of PATHS, chosen at random without repetition, into the new file OUT."""
    import random

    from ffrecord.writer import FileWriter

    _need_new(out)
    with _open(paths) as reader:
        if count > reader.n:
            raise click.UsageError(f"{count} of {reader.n} records: choose fewer")
        chosen = random.Random(seed).sample(range(reader.n), count)
        with _progress("sample", count) as advance, FileWriter(out, count) as writer:
            for at in range(0, count, 256):
                writer.write(reader.read(chosen[at : at + 256]))
                advance(len(chosen[at : at + 256]))
    _print({"records": count, "seed": seed, "bytes": os.path.getsize(out)}, json)
