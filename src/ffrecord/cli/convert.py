"""`ffrecord convert`: from and to other formats of training data."""

from __future__ import annotations

import click

from ffrecord.cli.common import (
    debug_option,
    json_option,
    need_new,
    print_result,
    shown_warnings,
    size_of,
)
from ffrecord.cli.progress import Progress
from ffrecord.convert.formats import FORMATS

_formats = click.Choice(list(FORMATS))


@click.command()
@click.argument("sources", nargs=-1, required=True)
@click.argument("target")
@click.option("--from", "source_format", type=_formats, help="Of SOURCES.  [default: by name]")
@click.option("--to", "target_format", type=_formats, help="Of TARGET.  [default: by its suffix]")
@click.option("--keys/--no-keys", default=True, help="Keep names as keys of records.")
@click.option("--field", help="WebDataset: only this file of each sample, such as jpg.")
@click.option("--column", help="HF datasets: only this column's bytes, not whole rows.")
@click.option(
    "--part-size",
    type=click.IntRange(1, 1 << 20),
    help="Write a directory of parts of about this many MiB.",
)
@json_option
@debug_option
def convert(
    sources: tuple[str, ...],
    target: str,
    source_format: str | None,
    target_format: str | None,
    keys: bool,
    field: str | None,
    column: str | None,
    part_size: int | None,
    json: bool,
) -> None:
    """Convert SOURCES into the new TARGET; one side is a record file.

    Formats: ffrecord, folder, webdataset (.tar), tfrecord, lmdb, array_record, huggingface
    (a directory that save_to_disk made).
    """
    from ffrecord.convert import Options, plan
    from ffrecord.convert import convert as convert_files

    need_new(target)
    options = Options(keys, field, column, None if part_size is None else part_size << 20)
    try:
        formats = plan(sources, target, source_format, target_format, options)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    with shown_warnings(), Progress("convert", None) as progress:
        counts = convert_files(
            sources,
            target,
            source_format=formats[0],
            target_format=formats[1],
            options=options,
            progress=progress,
            total=progress.set_total,
        )
    result = {"records": counts.records, "files": counts.files, "bytes": size_of(target)}
    print_result(result, json)
