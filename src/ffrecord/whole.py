"""A directory or a file that appears under its name when all of it is written, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
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


@contextlib.contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Give a new name beside `target` to write under, and rename that to `target` at the end.

    Something must be written under it. An exception removes it.

    Raises:
        OSError: The file cannot be flushed or renamed.
    """
    target = target.absolute()
    work = target.with_name(f".{target.name}.{secrets.token_hex(6)}.tmp")
    try:
        yield work
        descriptor = os.open(work, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(work, target)
        flush_directory(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(work)
        raise
