"""Many files read or written at once, by threads.

Opening a small file costs more than its bytes, on a network file system a hundred times more, so
several are under way at a time. What is read ahead is bounded in bytes; results keep their order.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from ffrecord.writer import BufferLike, flat

if TYPE_CHECKING:
    from typing_extensions import Self

WORKERS = 8
# Files that are larger than a piece of work are read alone; 64 MiB in all wait for their turn.
_AHEAD_BYTES = 64 << 20


def read_files(paths: Sequence[str], workers: int | None = None) -> Iterator[bytes]:
    """Yield the contents of files, in order.

    Args:
        paths: The files.
        workers: How many threads read ahead; 8 by default.

    Raises:
        OSError: A file cannot be read.
    """
    count = WORKERS if workers is None else workers
    waiting: deque[tuple[Future[bytes], int]] = deque()
    held = 0
    with ThreadPoolExecutor(count, "ffrecord-read") as pool:
        try:
            for path in paths:
                size = os.stat(path).st_size
                while waiting and (held + size > _AHEAD_BYTES or len(waiting) >= 4 * count):
                    task, done = waiting.popleft()
                    yield task.result()
                    held -= done
                waiting.append((pool.submit(_read, path), size))
                held += size
            while waiting:
                yield waiting.popleft()[0].result()
        finally:
            for task, _ in waiting:
                task.cancel()


def _read(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()


class FilesWriter:
    """Writes files below a directory, in several threads.

    Args:
        directory: It exists.
        workers: How many threads; 8 by default.
    """

    def __init__(self, directory: Path, workers: int | None = None) -> None:
        self._directory = directory
        self._pool = ThreadPoolExecutor(WORKERS if workers is None else workers, "ffrecord-write")

    def write(self, items: Sequence[tuple[str, BufferLike]]) -> None:
        """Write new files, all of which are complete when it returns.

        Args:
            items: Paths below the directory, in directories that exist, and contents.

        Raises:
            FileExistsError: A path exists.
            OSError: A file cannot be written.
        """
        for _ in self._pool.map(self._write, items):
            pass

    def _write(self, item: tuple[str, BufferLike]) -> None:
        name, data = item
        # Never through a name that is there: it would be the same file twice.
        with open(self._directory / name, "xb", buffering=0) as file:
            view = memoryview(flat(data))
            while view.nbytes:
                view = view[file.write(view) :]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._pool.shutdown(cancel_futures=True)
