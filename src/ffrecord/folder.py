"""A folder of files in one record file: `pack_folder`, `PackedFolder`, `unpack`.

The files' contents are the records, depth first, names sorted in each directory; the last record is
the index (see `folder_index`). Modes, times and links are not kept.
"""

from __future__ import annotations

import os
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ffrecord import folder_index
from ffrecord.files import FilesWriter, read_files
from ffrecord.folder_index import Tree
from ffrecord.folder_scan import scan
from ffrecord.names import collisions
from ffrecord.paths import PathLike
from ffrecord.reader import FileReader
from ffrecord.whole import whole_directory
from ffrecord.writer import FileWriter

if TYPE_CHECKING:
    from typing_extensions import Self

Progress = Callable[[int], object]


class NameWarning(UserWarning):
    """Names that are different here and the same on other file systems."""


class PackedFolder:
    """The files of a packed folder, by their paths in it.

    Args:
        ffr_file: The record file.
        check_data: Compare checksums.

    Attributes:
        reader: The `FileReader`; the last of its records is the index.
        tree: Names to records' indices, and to trees for directories.

    Raises:
        DamagedFileError: It is no packed folder, or is damaged.
    """

    def __init__(self, ffr_file: PathLike, check_data: bool = True) -> None:
        self.reader = FileReader(ffr_file, check_data)
        path = self.reader.fnames[-1]
        last = self.reader.read_one(-1).tobytes() if self.reader.n else b""
        self.tree = folder_index.decode(last, self.reader.n - 1, path)

    def read_one(self, path: PathLike) -> NDArray[np.uint8]:
        """Read one file.

        Raises:
            FileNotFoundError: There is no such path.
            IsADirectoryError: It is a directory.
        """
        return self.reader.read_one(self._record(path))

    def read(self, paths: Sequence[PathLike]) -> list[NDArray[np.uint8]]:
        """Read several files; a single path counts as a list of one."""
        if isinstance(paths, (str, os.PathLike)):
            paths = [paths]
        return self.reader.read([self._record(path) for path in paths])

    def list(
        self,
        path: PathLike | None = None,
        list_file: bool = True,
        list_dir: bool = True,
        recursive: bool = False,
    ) -> Sequence[str]:
        """Return the names in a directory, with `recursive` all paths below it, relative to it.

        Raises:
            FileNotFoundError: There is no such path.
            NotADirectoryError: It is a file.
        """
        tree = self._find(path or "")
        if isinstance(tree, int):
            raise NotADirectoryError(f"{path} is a file in {self._name}")
        return [
            name
            for name, record in folder_index.walk(tree)
            if (list_dir if record is None else list_file) and (recursive or "/" not in name)
        ]

    def exists(self, path: PathLike) -> bool:
        """Whether there is a file or a directory of this path."""
        return self._look_up(path) is not None

    def is_file(self, path: PathLike) -> bool:
        """Whether there is a file of this path."""
        return isinstance(self._look_up(path), int)

    def is_dir(self, path: PathLike) -> bool:
        """Whether there is a directory of this path."""
        return isinstance(self._look_up(path), OrderedDict)

    def num_files(self) -> int:
        """Return the number of files."""
        return sum(record is not None for _, record in folder_index.walk(self.tree))

    def close(self) -> None:
        """Let go of the file."""
        self.reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def _name(self) -> str:
        return self.reader.fnames[-1]

    def _look_up(self, path: PathLike) -> int | Tree | None:
        found: int | Tree = self.tree
        for name in os.fspath(path).split("/"):
            if name in ("", "."):
                continue
            if isinstance(found, int) or name not in found:
                return None
            found = found[name]
        return found

    def _find(self, path: PathLike) -> int | Tree:
        found = self._look_up(path)
        if found is None:
            raise FileNotFoundError(f"no {os.fspath(path)} in {self._name}")
        return found

    def _record(self, path: PathLike) -> int:
        found = self._find(path)
        if not isinstance(found, int):
            raise IsADirectoryError(f"{os.fspath(path)} is a directory in {self._name}")
        return found


def pack_folder(
    folder: PathLike,
    out_file: PathLike,
    verbose: bool = False,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
) -> None:
    """Write a folder's files into one record file.

    Args:
        folder: The folder. Links in it are followed, but must not lead out of it.
        out_file: The record file; it appears when it is complete.
        verbose: Print each path.
        progress: Called with 1 after each file.
        workers: How many threads read ahead; 8 by default.

    Raises:
        NotADirectoryError: `folder` is no directory.
        ValueError: A link leads out of the folder or around in a circle, there is something that
            is neither a file nor a directory, or a name or a depth that readers refuse (a
            backslash; more than 200 directories). All such paths are named.
    """
    scanned = scan(folder)
    report_collisions(folder_index.paths(scanned.tree), os.fspath(folder))
    names = folder_index.files(scanned.tree)
    with FileWriter(out_file, len(scanned.paths) + 1) as writer:
        for name, data in zip(names, read_files(scanned.paths, workers), strict=True):
            writer.write_one(data)
            if verbose:
                print(name)
            if progress:
                progress(1)
        writer.write_one(folder_index.encode(scanned.tree))


def unpack(
    ffr_file: PathLike,
    folder: PathLike,
    *,
    progress: Progress | None = None,
    workers: int | None = None,
) -> None:
    """Write the files of a packed folder into a new directory, which appears when it is complete.

    Args:
        ffr_file: The packed folder. Names that could lead out of the directory are refused.
        folder: The directory; it must not exist yet, or be empty.
        progress: Called with the number of files after each batch.
        workers: How many threads write; 8 by default.

    Raises:
        FileExistsError: `folder` has something in it.
        DamagedFileError: The file is damaged, or has names that could do harm.
    """
    target = Path(folder)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise FileExistsError(f"{target} exists and is not an empty directory")
    with PackedFolder(ffr_file) as packed:
        report_collisions(folder_index.paths(packed.tree), os.fspath(ffr_file))
        names: dict[int, list[str]] = {}
        with whole_directory(target) as work, FilesWriter(work, workers) as files:
            for name, record in folder_index.walk(packed.tree):
                if record is None:
                    (work / name).mkdir()
                else:
                    names.setdefault(record, []).append(name)
            for first, last in packed.reader.pieces():
                wanted = [record for record in range(first, last) if record in names]
                batch = packed.reader.read(wanted, writable=False)
                files.write(
                    [
                        (name, data)
                        for record, data in zip(wanted, batch, strict=True)
                        for name in names[record]
                    ]
                )
                if progress:
                    progress(sum(len(names[record]) for record in wanted))


def report_collisions(paths: Iterable[str], name: str) -> None:
    """Warn of paths that are one and the same file on some systems.

    Args:
        paths: All of them.
        name: Where they are, for the message.
    """
    groups = collisions(paths)
    if groups:
        listed = "; ".join(" and ".join(group) for group in groups[:5])
        more = f"; and {len(groups) - 5} more" if len(groups) > 5 else ""
        warnings.warn(
            f"names in {name} differ only in case or accents' form and are one file on some "
            f"systems: {listed}{more}",
            NameWarning,
            stacklevel=3,
        )
