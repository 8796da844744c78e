"""One function over many items in a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def in_threads(work: Callable[[Item], None], items: Iterable[Item], threads: int) -> None:
    """Call `work` with each item, in several threads, the calling one among them.

    The first exception ends all and is raised, when no thread works any more: Ctrl-C too waits for
    the items that are being worked on, since they use files and memory that the caller lets go of.
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

    def help_(ended: threading.Event) -> None:
        run()
        ended.set()

    helpers: list[tuple[threading.Thread, threading.Event]] = []
    try:
        for _ in range(threads - 1):
            ended = threading.Event()
            helper = threading.Thread(target=help_, args=(ended,), daemon=True)
            helpers.append((helper, ended))
            try:
                helper.start()
            except RuntimeError:  # there are too many
                helpers.pop()
                raise
        run()
    except BaseException as error:
        failed.append(error)
    # Not by join(): up to Python 3.12 one that is interrupted takes its thread for ended.
    for _, ended in helpers:
        while not ended.is_set():
            try:
                ended.wait()
            except BaseException as error:
                failed.append(error)
    if failed:
        raise failed[0]
    for helper, _ in helpers:
        helper.join()
