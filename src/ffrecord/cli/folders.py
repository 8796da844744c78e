"""Commands for folders in one file: pack, unpack."""

from __future__ import annotations

import os

import click

from ffrecord.cli.common import (
    debug_option,
    json_option,
    need_new,
    print_result,
    shown_warnings,
)
from ffrecord.cli.progress import Progress


@click.command()
@click.argument("folder", type=click.Path(exists=True, file_okay=False))
@click.argument("out")
@json_option
@debug_option
def pack(folder: str, out: str, json: bool) -> None:
    """Pack the files of FOLDER into the record file OUT."""
    from ffrecord.folder import PackedFolder, pack_folder

    need_new(out)
    total = sum(len(files) for _, _, files in os.walk(folder))
    with Progress("pack", total) as advance, shown_warnings():
        pack_folder(folder, out, progress=advance)
    with PackedFolder(out) as packed:
        print_result({"files": packed.num_files(), "bytes": os.path.getsize(out)}, json)


@click.command()
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
    with Progress("unpack", total) as advance, shown_warnings():
        unpack_folder(path, folder, progress=advance)
    print_result({"files": total}, json)
