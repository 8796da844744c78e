"""New files, compressed or not, whose bytes depend on nothing but what is written."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, cast


@contextlib.contextmanager
def create(path: Path, compressed: bool) -> Iterator[BinaryIO]:
    """Create a file for writing; a gzip header gets neither a name nor a time.

    Raises:
        FileExistsError: It exists.
    """
    with open(path, "xb") as file:
        if not compressed:
            yield file
            return
        with gzip.GzipFile("", "wb", fileobj=file, mtime=0) as packed:
            yield cast(BinaryIO, packed)
