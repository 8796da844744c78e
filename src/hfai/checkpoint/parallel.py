"""One function over many items in a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def in_threads(work: Callable[[Item], None], items: Iterable[Item], threads: int) -> None:
    """Call `work` with each item, in several threads, the calling one among them.

    The first exception ends all and is raised.
    """
    source, lock = iter(items), threading.Lock()
    failed: list[BaseException] = []

    def run() -> None:
        while not failed:
            try:
                with lock:
                    item = next(source, _END)
                if item is _END:
                    return
                work(item)  # type: ignore[arg-type]
            except BaseException as error:
                failed.append(error)

    helpers = [threading.Thread(target=run, daemon=True) for _ in range(threads - 1)]
    for helper in helpers:
        helper.start()
    run()
    for helper in helpers:
        helper.join()
    if failed:
        raise failed[0]
