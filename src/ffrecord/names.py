"""Names in a packed folder: which of them could do harm when they become files."""

from __future__ import annotations

import unicodedata
from collections import defaultdict
from collections.abc import Iterable


def unsafe(name: str) -> str | None:
    """Say why one component of a path must not become a file's name, or None where it may."""
    if name in ("", ".", ".."):
        return "is no name of a file"
    if "/" in name or "\\" in name:
        return "has a separator in it"
    if "\0" in name:
        return "has a zero byte in it"
    return None


def collisions(paths: Iterable[str]) -> list[list[str]]:
    """Return groups of paths that are one and the same file on some systems.

    Those ignore case, or whether an accented letter is one character or two (Unicode's forms NFC
    and NFD).
    """
    groups: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        groups[unicodedata.normalize("NFC", path).casefold()].append(path)
    return [group for group in groups.values() if len(group) > 1]
