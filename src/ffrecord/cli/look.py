"""Commands that look into record files and change nothing: info, ls, cat, verify."""

from __future__ import annotations

import json as json_module
import sys
from collections.abc import Callable
from typing import Any

import click

from ffrecord.cli.common import (
    debug_option,
    is_packed,
    json_option,
    open_reader,
    paths_argument,
    print_result,
)
from ffrecord.cli.progress import Progress


@click.command()
@paths_argument
@json_option
@debug_option
def info(paths: tuple[str, ...], json: bool) -> None:
    """Say what PATHS hold: records, files, bytes, sizes."""
    import numpy as np

    with open_reader(paths) as reader:
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
        print_result(
            {
                "records": reader.n,
                "files": len(reader.fnames),
                "bytes_in_records": total,
                "bytes_in_gaps": gap,
                "smallest_record": smallest or 0,
                "mean_record": round(total / reader.n, 1) if reader.n else 0,
                "largest_record": largest,
                "packed_folder": is_packed(reader),
                "keys": sum(len(reader.get_keys(k)) for k in range(len(reader.fnames))),
                "metadata": reader.get_metadata(0),
                "schema": reader.get_schema(0),
            },
            json,
        )


@click.command()
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
    with open_reader(paths) as reader:
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


@click.command()
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
        reader = open_reader((path,))

        def read(text: str) -> Any:
            try:
                return reader.read_one(int(text))
            except ValueError:
                raise click.BadParameter(f"{text} is not the index of a record") from None

    for item in which:
        sys.stdout.buffer.write(read(item).data)
    sys.stdout.buffer.flush()


@click.command()
@paths_argument
@click.option("--headers", is_flag=True, help="Only headers: seconds instead of a full read.")
@json_option
@debug_option
def verify(paths: tuple[str, ...], headers: bool, json: bool) -> int:
    """Check headers and every record; name each damaged one. Exits with 1 if there is any."""
    from ffrecord.damage import damaged_in

    with open_reader(paths) as reader:
        reader.validate()
        found = []
        if not headers:
            with Progress("verify", reader.n) as advance:
                for first, last in reader.pieces():
                    for error in damaged_in(reader, range(first, last)):
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
            print_result(result, False)
    return 1 if found else 0
