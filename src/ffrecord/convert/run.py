"""A conversion: which formats, then entries from sources to a target."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from ffrecord.convert.formats import FORMATS, detect_source, detect_target
from ffrecord.convert.model import Counts, Entry, Options, Source
from ffrecord.paths import PathLike


def convert(
    sources: Sequence[PathLike],
    target: PathLike,
    *,
    source_format: str | None = None,
    target_format: str | None = None,
    options: Options | None = None,
    progress: Callable[[int], object] | None = None,
    total: Callable[[int | None], object] | None = None,
) -> Counts:
    """Read all of some sources, in order, and write one target.

    Args:
        sources: Files or directories, all of one format.
        target: A file or directory that does not exist; it appears when it is complete.
        source_format: One of `FORMATS`; found by name and contents where None.
        target_format: Likewise; found by the name alone.
        options: What to read and write; see there.
        progress: Called with the number of records after each few.
        total: Called once with the number of records, or None where that is not known.

    Returns:
        What was read and written.

    Raises:
        ValueError: A format is not known, neither side is ffrecord, or an option does not fit.
        FileExistsError: The target exists.
        FileNotFoundError: A source does not exist.
        ImportError: A format's library is missing; the message says how to install it.
        DamagedFileError: A source is damaged.
    """
    options = options or Options()
    kind, out_kind = plan(sources, target, source_format, target_format, options)
    if os.path.lexists(target):
        raise FileExistsError(f"{os.fspath(target)} exists: remove it, or give another name")
    opener = importlib.import_module(FORMATS[kind])
    source = _joined([opener.open_source(Path(path), options) for path in sources])
    if total:
        total(source.total)
    writer = importlib.import_module(FORMATS[out_kind])
    entries = _counted(source.entries, progress)
    counts: Counts = writer.write(Path(target), source._replace(entries=entries), options)
    return counts


def plan(
    sources: Sequence[PathLike],
    target: PathLike,
    source_format: str | None = None,
    target_format: str | None = None,
    options: Options | None = None,
) -> tuple[str, str]:
    """Return the formats of a conversion, without reading or writing; arguments as for `convert`.

    Raises:
        ValueError: They cannot be.
        FileNotFoundError: A source does not exist.
    """
    if not sources:
        raise ValueError("there is no source: give one or more")
    for name in (*sources, target):
        if "://" in os.fspath(name):
            raise ValueError(
                f"{os.fspath(name)}: conversions are of local files; `ffrecord merge` copies "
                "record files from a store"
            )
    paths = [Path(source) for source in sources]
    for path in paths:
        if not path.exists():
            raise FileNotFoundError(f"no such file or directory: {path}")
    kinds = {source_format or detect_source(path) for path in paths}
    if len(kinds) > 1:
        raise ValueError(f"the sources are of several formats: {', '.join(sorted(kinds))}")
    kind, out_kind = kinds.pop(), target_format or detect_target(Path(target))
    for name in (kind, out_kind):
        if name not in FORMATS:
            raise ValueError(f"no format {name!r}: give one of {', '.join(FORMATS)}")
    if "ffrecord" not in (kind, out_kind):
        raise ValueError(
            f"{kind} to {out_kind}: one side must be ffrecord; convert to a record file first"
        )
    (options or Options()).check(kind, out_kind)
    return kind, out_kind


def _joined(sources: Sequence[Source]) -> Source:
    """Return sources one after the other.

    Raises:
        ValueError: They have different schemas.
    """
    schemas = [source.schema for source in sources]
    if any(schema != schemas[0] for schema in schemas):
        raise ValueError("the sources have different schemas: convert them one by one")
    totals = [source.total for source in sources]
    total = None if None in totals else sum(count for count in totals if count is not None)
    metadata = [source.metadata for source in sources]
    common = metadata[0] if all(one == metadata[0] for one in metadata) else None
    tree = sources[0].tree if len(sources) == 1 else None
    entries = (entry for source in sources for entry in source.entries)
    return Source(entries, total, common, schemas[0], tree)


def _counted(entries: Iterator[Entry], progress: Callable[[int], object] | None) -> Iterator[Entry]:
    for entry in entries:
        yield entry
        if progress:
            progress(1)
