"""The `ffrecord` command: the group; each file beside this one holds a few of its commands."""

from __future__ import annotations

import click

from ffrecord import __version__
from ffrecord.cli import bench, convert, doctor, folders, look, make
from ffrecord.cli.common import EXIT_CODES, Group, debug_option


@click.group(cls=Group, epilog=EXIT_CODES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="ffrecord")
@debug_option
def main() -> None:
    """Look into record files (.ffr), check them, and make new ones.

    PATHS are record files or one directory of them, read as one run of records.
    """


for _command in (
    look.info,
    look.ls,
    look.cat,
    look.verify,
    make.sample,
    make.merge,
    make.split,
    folders.pack,
    folders.unpack,
    convert.convert,
    bench.bench,
    doctor.doctor,
):
    main.add_command(_command)
