"""Finds the readers that an object holds, for code that closes or inspects them."""

from __future__ import annotations

from typing import Any

from ffrecord.reader import FileReader


class ReaderRegistry:
    """A class whose instances know the readers among their attributes."""

    def ffreaders(self) -> list[FileReader]:
        """Return each reader once, in the order of attributes.

        Attributes of attributes count where those are registries too, as data sets are, and so do
        the items of lists, tuples and dictionaries.
        """
        found: dict[int, FileReader] = {}
        seen: set[int] = set()
        waiting: list[Any] = [self]
        while waiting:
            item = waiting.pop()
            if id(item) in seen:
                continue
            seen.add(id(item))
            if isinstance(item, FileReader):
                found[id(item)] = item
            else:
                waiting.extend(reversed(_inside(item)))
        return list(found.values())


def _inside(item: Any) -> list[Any]:
    if isinstance(item, ReaderRegistry):
        return list(vars(item).values())
    if isinstance(item, dict):
        return list(item.values())
    # A long list of indices holds no reader; its first item says so.
    if isinstance(item, (list, tuple)) and item and not isinstance(item[0], int):
        return list(item)
    return []
