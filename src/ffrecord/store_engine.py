"""The engine of object stores: ranges merged, many requests at a time, a cache on the local disk.

obstore's `get_ranges` keeps ten requests of one object in flight; a batch is dealt out to as many
such calls as `StoreOptions.in_flight` allows, in threads that live for the batch. Only the ranges
that a batch needs are fetched, or with a cache the whole blocks around them.
"""

from __future__ import annotations

import errno
import functools
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ffrecord.block_cache import BLOCK, BlockCache
from ffrecord.engine import Engine, RequestError, Requests, ShortReadError
from ffrecord.store import StoreObject
from ffrecord.store_options import StoreOptions

# What obstore fetches at a time in one call.
_AT_A_TIME = 10
# A range is not made longer than this, so that the parts of a long record come side by side.
_LONGEST = 1 << 20
# Ranges of one call at most: with few calls the last one would be waited for alone.
_MOST_RANGES = 64


class Wanted(NamedTuple):
    """A request: its number in the batch, its place in the object and in the arena."""

    number: int
    start: int
    end: int
    position: int


class Range(NamedTuple):
    """Bytes of one object that some requests need."""

    source: StoreObject
    start: int
    end: int
    requests: list[Wanted]

    def place(self, data: bytes, memory: memoryview) -> None:
        """Copy into the arena what the requests need of these bytes, which start at `start`."""
        for wanted in self.requests:
            first, last = max(wanted.start, self.start), min(wanted.end, self.end)
            at = wanted.position + first - wanted.start
            memory[at : at + last - first] = data[first - self.start : last - self.start]


class StoreEngine(Engine):
    """Reads objects of stores; a request's key is its `StoreObject.number`.

    Args:
        options: How.
    """

    name = "store"

    def __init__(self, options: StoreOptions) -> None:
        self._options = options

    def read_batch(
        self, requests: Requests, arena: NDArray[np.uint8], *, checksums: bool
    ) -> NDArray[np.uint32] | None:
        """Fetch the ranges that the requests need, and copy them into place."""
        memory = arena.data
        ranges = list(plan(requests, self._options))
        cache = None
        if self._options.cache is not None:
            cache = open_cache(os.fspath(self._options.cache), self._options.cache_bytes)
            ranges = [found for found in ranges if not _cached(cache, found, memory)]
        if ranges:
            self._fetch(ranges, cache, memory)
        if not checksums:
            return None
        return np.fromiter(
            (
                zlib.crc32(memory[position : position + length])
                for position, length in zip(
                    requests.positions.tolist(), requests.lengths.tolist(), strict=True
                )
            ),
            np.uint32,
            len(requests.keys),
        )

    def _fetch(self, ranges: list[Range], cache: BlockCache | None, memory: memoryview) -> None:
        calls = list(_deal(ranges, self._options.in_flight))
        width = min(_AT_A_TIME, max(len(call) for call in calls))
        threads = min(len(calls), -(-self._options.in_flight // width))
        with ThreadPoolExecutor(threads, thread_name_prefix="ffrecord-store") as pool:
            waiting = {pool.submit(_fetch_call, call): call for call in calls}
            try:
                for done in as_completed(waiting):
                    for found, data in zip(waiting[done], done.result(), strict=True):
                        found.place(data, memory)
                        if cache is not None:
                            source = found.source
                            cache.put(source.path, source.version, found.start // BLOCK, data)
            except OSError as error:
                first = waiting[done][0].requests[0].number
                code, words = error.errno or errno.EIO, error.strerror or str(error)
                raise RequestError(code, words, first) from error
            finally:
                pool.shutdown(wait=True, cancel_futures=True)


def plan(requests: Requests, options: StoreOptions) -> Iterator[Range]:
    """Merge requests that are near each other, and cut what is long, or all into blocks.

    Yields:
        Ranges that together hold every byte asked for, by object and offset.

    Raises:
        ShortReadError: An object ends before a request.
    """
    keys, offsets, lengths, positions = (column.tolist() for column in requests)
    sources = {key: StoreObject.by_number[key] for key in set(keys)}
    for number, (key, offset, length) in enumerate(zip(keys, offsets, lengths, strict=True)):
        if offset + length > sources[key].size:
            raise ShortReadError(0, "the object ends before the request", number)
    blocks = options.cache is not None
    order = np.lexsort((requests.offsets, requests.keys)).tolist()
    span: list[Wanted] = []
    owner, end = -1, 0
    for number in order:
        if not lengths[number]:
            continue
        start = offsets[number]
        if span and (keys[number] != owner or start > end + options.gap):
            yield from _cut(sources[owner], span, end, blocks)
            span = []
        if not span:
            owner, end = keys[number], 0
        end = max(end, start + lengths[number])
        span.append(Wanted(number, start, start + lengths[number], positions[number]))
    if span:
        yield from _cut(sources[owner], span, end, blocks)


def _cut(source: StoreObject, span: list[Wanted], end: int, blocks: bool) -> Iterator[Range]:
    """Cut the range of some neighbouring requests; pieces that none of them needs are left out."""
    step = BLOCK if blocks else _LONGEST
    start = span[0].start // BLOCK * BLOCK if blocks else span[0].start
    end = min(-(-end // BLOCK) * BLOCK, source.size) if blocks else end
    pieces: dict[int, list[Wanted]] = {}
    for wanted in span:
        for piece in range((wanted.start - start) // step, (wanted.end - 1 - start) // step + 1):
            pieces.setdefault(piece, []).append(wanted)
    for piece, members in sorted(pieces.items()):
        at = start + piece * step
        yield Range(source, at, min(at + step, end), members)


def _deal(ranges: list[Range], in_flight: int) -> Iterator[list[Range]]:
    """Deal ranges out to calls, each of one object."""
    calls = max(1, in_flight // _AT_A_TIME)
    for _, of_one in groupby(ranges, key=lambda found: found.source.number):
        members = list(of_one)
        size = min(_MOST_RANGES, max(1, -(-len(members) // calls)))
        for first in range(0, len(members), size):
            yield members[first : first + size]


def _fetch_call(call: list[Range]) -> list[bytes]:
    starts = [found.start for found in call]
    return call[0].source.fetch(starts, [found.end - found.start for found in call])


def _cached(cache: BlockCache, found: Range, memory: memoryview) -> bool:
    """Whether the cache has a block, which then is put into place."""
    data = cache.get(found.source.path, found.source.version, found.start // BLOCK)
    if data is None or len(data) != found.end - found.start:
        return False
    found.place(data, memory)
    return True


@functools.lru_cache(maxsize=16)
def open_cache(directory: str, most: int) -> BlockCache:
    """Return this process's view of a cache directory."""
    return BlockCache(directory, most)
