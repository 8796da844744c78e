"""What a folder holds: its files in the order in which they are packed, and what cannot be."""

from __future__ import annotations

import os
import stat
from collections import OrderedDict
from typing import NamedTuple

from ffrecord.folder_index import MOST_LEVELS, Tree
from ffrecord.names import unsafe
from ffrecord.paths import PathLike


class Scan(NamedTuple):
    """The files below a folder.

    Attributes:
        tree: Names to places in `paths`, and to trees for directories.
        paths: The files, depth first, names sorted in each directory.
    """

    tree: Tree
    paths: list[str]


def scan(folder: PathLike) -> Scan:
    """List the files below a folder.

    Raises:
        NotADirectoryError: `folder` is no directory.
        ValueError: A link leads out of the folder or around in a circle, there is something that
            is neither a file nor a directory, or a name or a depth that readers refuse. All such
            paths are named.
    """
    root = os.path.realpath(folder)
    if not os.path.isdir(root):
        raise NotADirectoryError(f"{os.fspath(folder)} is not a directory")
    paths: list[str] = []
    problems: list[str] = []
    tree = _scan(root, (root,), "", paths, problems)
    if problems:
        raise ValueError(f"{os.fspath(folder)} is not packed: " + "; ".join(problems))
    return Scan(tree, paths)


def _scan(
    root: str, above: tuple[str, ...], prefix: str, paths: list[str], problems: list[str]
) -> Tree:
    """Number the files below a directory, and note what cannot be packed."""
    tree: Tree = OrderedDict()
    for name in sorted(os.listdir(above[-1])):
        path = os.path.join(above[-1], name)
        real = os.path.realpath(path)
        if reason := unsafe(name):
            problems.append(f"{prefix}{name} {reason}")
            continue
        if os.path.islink(path) and os.path.commonpath([root, real]) != root:
            problems.append(f"{prefix}{name} is a link that leads out of it")
            continue
        try:
            mode = os.stat(path).st_mode
        except OSError as error:
            problems.append(f"{prefix}{name}: {error.strerror}")
            continue
        if stat.S_ISREG(mode):
            tree[name] = len(paths)
            paths.append(path)
        elif not stat.S_ISDIR(mode):
            problems.append(f"{prefix}{name} is neither a file nor a directory")
        elif real in above:
            problems.append(f"{prefix}{name} is a link to a directory above it")
        elif len(above) > MOST_LEVELS:
            problems.append(f"{prefix}{name} is more than {MOST_LEVELS} directories deep")
        else:
            tree[name] = _scan(root, (*above, real), f"{prefix}{name}/", paths, problems)
    return tree
