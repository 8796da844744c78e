"""Writes records into parts of about one size, in a directory that appears when it is complete."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ffrecord.paths import PathLike
from ffrecord.whole import whole_directory
from ffrecord.writer import BufferLike, FileWriter, as_view

if TYPE_CHECKING:
    from typing_extensions import Self

PART_BYTES = 256 << 20


def part_name(number: int) -> str:
    """Return the name of a part in its directory."""
    return f"PART_{number:05d}.ffr"


class PartWriter:
    """A writer of `PART_00000.ffr` and so on, for records whose number is not known before.

    Leaving the `with` block by an exception leaves nothing, and so does a write that fails.

    Args:
        directory: The directory; it must not exist, or be empty.
        part_bytes: A part that has this many bytes or more is followed by another.
        metadata: As for `FileWriter`, in every part.
        schema: Likewise.

    Attributes:
        count: How many records have been written.
        files: How many parts have been begun.

    Raises:
        FileExistsError: `directory` has something in it.
        ValueError: `part_bytes` is less than 1.
    """

    def __init__(
        self,
        directory: PathLike,
        part_bytes: int = PART_BYTES,
        *,
        metadata: Mapping[str, Any] | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        if part_bytes < 1:
            raise ValueError(f"part_bytes is {part_bytes}: give 1 or more")
        target = Path(directory)
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise FileExistsError(f"{target} exists and is not an empty directory")
        self._part_bytes = part_bytes
        self._metadata, self._schema = metadata, schema
        self._process = os.getpid()
        self._failure: str | None = None
        self._is_closed = False
        self._target = target
        self._stack = contextlib.ExitStack()
        self._directory = self._stack.enter_context(whole_directory(target))
        self._bytes = 0
        self.count = 0
        self.files = 0
        try:
            self._writer = self._next()
        except BaseException as error:
            self._stack.__exit__(type(error), error, error.__traceback__)
            raise

    def write_one(self, buffer: BufferLike, key: str | None = None) -> None:
        """Append one record, as `FileWriter.write_one` does; a key is unique in its part.

        Raises:
            TypeError: As there.
            ValueError: As there.
            OSError: It could not be written, now or before; nothing is left then.
        """
        self._need_open()
        if self._bytes >= self._part_bytes:
            try:
                self._writer.close()
                self._writer = self._next()
            except BaseException as error:
                self._give_up(error)
                raise
        try:
            self._writer.write_one(buffer, key)
        except BaseException as error:
            if self._writer.has_failed:
                self._give_up(error)
            raise
        self._bytes += as_view(buffer).nbytes
        self.count += 1

    def close(self) -> None:
        """Complete the last part and let the directory appear; a second call does nothing.

        Raises:
            OSError: The last part could not be completed, or a write failed before; there is no
                directory then.
        """
        if self._is_closed:
            return
        self._need_open()
        try:
            self._writer.close()
            self._stack.close()
        except BaseException as error:
            self._give_up(error)
            raise
        self._is_closed = True

    def _give_up(self, error: BaseException) -> None:
        """Remove everything, and say so whenever the writer is used again."""
        self._failure = str(error) or type(error).__name__
        self._writer.abort()
        self._stack.__exit__(type(error), error, error.__traceback__)

    def _need_open(self) -> None:
        if self._failure is not None:
            raise OSError(f"the writer of {self._target} gave up after: {self._failure}")
        if self._is_closed:
            raise ValueError(f"the writer of {self._target} is closed")
        if os.getpid() != self._process:
            raise ValueError(
                f"the writer of {self._target} belongs to another process: open one here"
            )

    def _next(self) -> FileWriter:
        writer = FileWriter(
            self._directory / part_name(self.files), metadata=self._metadata, schema=self._schema
        )
        self.files += 1
        self._bytes = 0
        return writer

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is None:
            self.close()
        elif not self._is_closed and self._failure is None:
            self._is_closed = True
            self._writer.abort()
            self._stack.__exit__(kind, error, traceback)
