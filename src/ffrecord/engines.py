"""Which engine reads: the first that works of io_uring, libaio, threads, and Python.

What works is found out once a process by a real read, and why something does not is kept for
`explain`. The environment variable FFRECORD_ENGINE (one of `NAMES`) takes the place of "auto".
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

from ffrecord.engine import Engine, PythonEngine
from ffrecord.store_options import StoreOptions

NAMES = ("auto", "direct", "io_uring", "libaio", "threads", "python")

CACHED_PART = 0.5
"""A set that is larger than this part of the memory that is left would push itself out of the page
cache before it is read again, and is read past it."""

# The first that works is taken. Measured (benchmarks/results/records.json): with cold pages direct
# reads are the fastest and cost the least CPU, with hot ones reads through the cache are five times
# as fast. Linux AIO is asynchronous for direct reads alone, so it is no way to fill the cache.
_FOR_CACHED_SETS = ("io_uring", "threads", "python")
_FOR_LARGE_SETS = ("direct", "libaio", "threads", "python")


class Found(NamedTuple):
    """What works in this process.

    Attributes:
        engines: The engines by name.
        reasons: Why the others do not work, by name.
    """

    engines: dict[str, Engine]
    reasons: dict[str, str]


@functools.cache
def probe() -> Found:
    """Find out what works; the first call in a process reads, later ones remember."""
    found = Found({"python": PythonEngine()}, {})
    try:
        from ffrecord.native_engine import NativeEngine
        from ffrecord.native_engine import probe as probe_way
    except ImportError as error:
        for name in ("threads", "libaio", "io_uring", "direct"):
            found.reasons[name] = f"the native part is not there ({error})"
        return found
    found.engines["threads"] = NativeEngine("threads", "threads", direct=False, cached_first=True)
    if reason := probe_way("libaio"):
        found.reasons["libaio"] = f"a read through Linux AIO failed: {reason}"
    else:
        found.engines["libaio"] = NativeEngine("libaio", "libaio", direct=True, cached_first=False)
    if reason := probe_way("io_uring"):
        for name in ("io_uring", "direct"):
            found.reasons[name] = f"a read through io_uring failed: {reason}"
    else:
        for name, direct in (("io_uring", False), ("direct", True)):
            found.engines[name] = NativeEngine(
                name, "io_uring", direct=direct, cached_first=not direct
            )
    return found


def choose(name: str, size: int) -> Engine:
    """Return the engine of a name; "auto" takes the best for files of `size` bytes in all.

    Raises:
        ValueError: There is no such name.
        OSError: That engine does not work here.
    """
    if name not in NAMES:
        raise ValueError(f"engine is {name!r}: give one of {', '.join(NAMES)}")
    if name == "auto":
        name = os.environ.get("FFRECORD_ENGINE") or "auto"
        if name not in NAMES:
            raise ValueError(f"FFRECORD_ENGINE is {name!r}: set it to one of {', '.join(NAMES)}")
    found = probe()
    if name == "auto":
        large = size > CACHED_PART * available_memory()
        order = _FOR_LARGE_SETS if large else _FOR_CACHED_SETS
        name = next(candidate for candidate in order if candidate in found.engines)
    if name not in found.engines:
        raise OSError(f"the engine {name} does not work here: {found.reasons[name]}")
    return found.engines[name]


def for_stores(options: StoreOptions) -> Engine:
    """Return the engine for objects of stores; local files do not need what that loads."""
    from ffrecord.store_engine import StoreEngine

    return StoreEngine(options)


def available_memory() -> int:
    """Return the bytes that the page cache may still take: the machine's or the group's."""
    amounts = [1 << 62]
    try:
        with open("/proc/meminfo") as file:
            fields = dict(line.split(":", 1) for line in file)
        amounts.append(int(fields["MemAvailable"].split()[0]) * 1024)
        with open("/sys/fs/cgroup/memory.max") as file:
            amounts.append(int(file.read()))
    except (OSError, KeyError, ValueError):
        pass
    return min(amounts)


def explain() -> str:
    """Say which engine "auto" takes in this process, and why others do not work."""
    found = probe()
    forced = os.environ.get("FFRECORD_ENGINE")
    lines = [f"small sets: {choose('auto', 0).name}", f"large sets: {choose('auto', 1 << 62).name}"]
    if forced:
        lines.append(f"FFRECORD_ENGINE={forced}")
    lines.append(
        f"large: more than {available_memory() * CACHED_PART / 2**30:.1f} GiB, "
        "half of the memory that is left"
    )
    lines += [f"{name}: works" for name in NAMES if name in found.engines]
    lines += [f"{name}: {reason}" for name, reason in found.reasons.items()]
    return "\n".join(lines)
