"""A directory that appears under its name when all of it is written, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from ffrecord.writer import flush_directory


@contextlib.contextmanager
def whole_directory(target: Path) -> Iterator[Path]:
    """Give a working directory beside `target`, and rename it to `target` at the end.

    Its mode is by umask. An exception removes it.

    Raises:
        OSError: `target` exists and is not an empty directory, or cannot be written.
    """
    target = target.absolute()
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".tmp", dir=target.parent))
    try:
        yield work
        mask = os.umask(0)
        os.umask(mask)
        work.chmod(0o777 & ~mask)
        flush_directory(work)
        os.rename(work, target)
        flush_directory(target.parent)
    except BaseException:
        shutil.rmtree(work, ignore_errors=True)
        raise
