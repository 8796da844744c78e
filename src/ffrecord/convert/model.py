"""What all formats share: entries, an opened source, options, and the words for a missing library.

A format's module has `open_source(path, options) -> Source` and `write(path, source, options) ->
Counts`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from ffrecord.folder_index import Tree
from ffrecord.writer import BufferLike


class Entry(NamedTuple):
    """One record on its way.

    Attributes:
        data: Its bytes.
        key: Its name, or None where it has none.
    """

    data: BufferLike
    key: str | None = None


class Source(NamedTuple):
    """What is to be converted.

    Attributes:
        entries: The records, in order.
        total: How many there will be, or None where only reading tells.
        metadata: What a record file's writer was given, or None.
        schema: Likewise.
        tree: The index of a packed folder, or None.
    """

    entries: Iterator[Entry]
    total: int | None = None
    metadata: Mapping[str, Any] | None = None
    schema: Mapping[str, Any] | None = None
    tree: Tree | None = None


class Counts(NamedTuple):
    """What a conversion did.

    Attributes:
        records: Records written.
        files: Files they were written to.
    """

    records: int
    files: int = 1


@dataclass(frozen=True)
class Options:
    """What to read and write.

    Attributes:
        keys: Keep names as keys of records; without, records are known by their index alone.
        field: WebDataset: read only this file of each sample (an extension such as "jpg").
        column: HF datasets: the records are this column's bytes or text, instead of whole rows.
        part_bytes: Write a directory of parts of about this many bytes.
    """

    keys: bool = True
    field: str | None = None
    column: str | None = None
    part_bytes: int | None = None

    def check(self, source: str, target: str) -> None:
        """Refuse options that say nothing about these formats.

        Raises:
            ValueError: One does not.
        """
        if self.field is not None and source != "webdataset":
            raise ValueError(f"field is for reading webdataset, not {source}")
        if self.column is not None and source != "huggingface":
            raise ValueError(f"column is for reading huggingface, not {source}")
        if self.part_bytes is not None and (target != "ffrecord" or source == "folder"):
            raise ValueError("parts are for record files, and a packed folder is one file")


def library(module: str, package: str, what: str) -> Any:
    """Import what a format needs.

    Args:
        module: Its name in Python.
        package: Its name for pip.
        what: The format.

    Raises:
        ImportError: It is missing; the message says how to install it.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"{what} needs {package} ({error}): pip install {package}") from error


def named(entries: Iterator[Entry], suffix: str = "") -> Iterator[tuple[str, BufferLike]]:
    """Give every entry a name: its key, or its place as ten digits.

    Args:
        entries: Records.
        suffix: What names made from places end with.
    """
    for number, entry in enumerate(entries):
        yield entry.key if entry.key is not None else f"{number:010d}{suffix}", entry.data
