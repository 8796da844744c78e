"""Commands that make record files from record files: merge, split, sample.

Keys go with their records; metadata and schema do where all files have the same.
"""

from __future__ import annotations

import itertools
import operator
import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ffrecord.cli.common import (
    debug_option,
    is_packed,
    json_option,
    need_new,
    open_reader,
    paths_argument,
    print_result,
)
from ffrecord.cli.progress import Progress

if TYPE_CHECKING:
    from ffrecord.reader import FileReader

# Records that are read at a time where their order is not that of the files.
_BATCH = 256


def _open_records(paths: tuple[str, ...]) -> FileReader:
    """Open files whose records may be taken apart.

    Raises:
        click.UsageError: They are a packed folder.
    """
    reader = open_reader(paths)
    if is_packed(reader):
        raise click.UsageError(
            f"{reader.fnames[-1]} is a packed folder, whose index would be wrong: unpack it first"
        )
    return reader


class _Copier:
    """Copies records with their keys into new files."""

    def __init__(self, reader: FileReader, progress: Progress) -> None:
        from ffrecord.convert.records import keys_of

        self._reader = reader
        self._progress = progress
        self._keys = keys_of(reader)
        numbers = range(len(reader.fnames))
        texts = [(reader.get_metadata(k), reader.get_schema(k)) for k in numbers]
        if any(text != texts[0] for text in texts):
            click.echo("ffrecord: the files have different metadata, which are left out", err=True)
            texts = [(None, None)]
        self._extras: dict[str, Any] = {"metadata": texts[0][0], "schema": texts[0][1]}

    def copy(self, batches: Iterable[Iterable[int]], out: str, count: int) -> None:
        """Write one file of `count` records, read in these batches."""
        from ffrecord.writer import FileWriter

        with FileWriter(out, None if self._keys else count, **self._extras) as writer:
            for batch in batches:
                indices = list(batch)
                records = self._reader.read(indices, writable=False)
                for index, record in zip(indices, records, strict=True):
                    writer.write_one(record, self._keys.get(index))
                self._progress(len(indices))


def _pieces(reader: FileReader, each: int) -> Iterator[tuple[int, range]]:
    """Yield pieces of work in order, none across a border of `each` records: (part, records)."""
    for first, last in reader.pieces():
        while first < last:
            part = first // each
            stop = min(last, (part + 1) * each)
            yield part, range(first, stop)
            first = stop


@click.command()
@click.argument("out")
@paths_argument
@json_option
@debug_option
def merge(out: str, paths: tuple[str, ...], json: bool) -> None:
    """Write all records of PATHS, in order, into the new file OUT."""
    need_new(out)
    with _open_records(paths) as reader, Progress("merge", reader.n) as progress:
        pieces = (range(*piece) for piece in reader.pieces())
        _Copier(reader, progress).copy(pieces, out, reader.n)
        print_result({"records": reader.n, "bytes": os.path.getsize(out)}, json)


@click.command()
@click.argument("out")
@paths_argument
@click.option("--files", type=click.IntRange(1, 99_999), required=True, help="How many parts.")
@json_option
@debug_option
def split(out: str, paths: tuple[str, ...], files: int, json: bool) -> None:
    """Spread the records of PATHS, in order, over parts in the new directory OUT."""
    from ffrecord.parts import part_name
    from ffrecord.whole import whole_directory

    need_new(out)
    with _open_records(paths) as reader, Progress("split", reader.n) as progress:
        each = max(1, -(-reader.n // files))
        copier = _Copier(reader, progress)
        with whole_directory(Path(out)) as work:
            if reader.n == 0:
                copier.copy([], str(work / part_name(0)), 0)
            for part, pieces in itertools.groupby(_pieces(reader, each), operator.itemgetter(0)):
                count = min(each, reader.n - part * each)
                copier.copy((piece for _, piece in pieces), str(work / part_name(part)), count)
        made = max(1, -(-reader.n // each))
        print_result({"records": reader.n, "files": made, "records_a_file": each}, json)


@click.command()
@click.argument("out")
@paths_argument
@click.option("-n", "--count", type=click.IntRange(0), required=True, help="How many records.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the choice.")
@json_option
@debug_option
def sample(out: str, paths: tuple[str, ...], count: int, seed: int, json: bool) -> None:
    """Write COUNT records of PATHS, chosen at random without repetition, into the new file OUT."""
    need_new(out)
    with _open_records(paths) as reader, Progress("sample", count) as progress:
        if count > reader.n:
            raise click.UsageError(f"{count} of {reader.n} records: choose fewer")
        chosen = random.Random(seed).sample(range(reader.n), count)
        batches = (chosen[at : at + _BATCH] for at in range(0, count, _BATCH))
        _Copier(reader, progress).copy(batches, out, count)
        print_result({"records": count, "seed": seed, "bytes": os.path.getsize(out)}, json)
