"""Getting a shard file to its place: at once, or through staging buffers while training goes on."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hfai.checkpoint.format import shard_name
from hfai.checkpoint.parallel import in_threads
from hfai.checkpoint.shard import SEGMENT, Segment, segments
from hfai.checkpoint.staging import HostPool, locking
from hfai.checkpoint.storage import Sink

if TYPE_CHECKING:
    from hfai.checkpoint.handle import SaveHandle
    from hfai.checkpoint.saver import Prepared


@contextlib.contextmanager
def _sink(prepared: Prepared, direct: bool) -> Iterator[Sink]:
    """Open the shard file, write its header, and close it for good if the block does not raise."""
    name = prepared.location.name_of(shard_name(prepared.rank), prepared.generation)
    sink = prepared.writer.create(name, prepared.layout.size, direct)
    try:
        sink.write(0, [memoryview(prepared.layout.header)])
        yield sink
        sink.close()
    except BaseException:
        sink.abandon()
        raise


def directly(prepared: Prepared, threads: int) -> None:
    """Write the shard file from the tensors' memory; what is not ready for it goes by a buffer."""
    if not prepared.layout.slices:
        return
    contents = prepared.contents
    buffers = threading.local()

    def write(segment: Segment) -> None:
        if contents.is_direct(segment):
            views = contents.direct(segment)
        else:
            if not hasattr(buffers, "one"):
                buffers.one = _buffer(contents.devices())
            contents.copy(segment, buffers.one)
            _synchronize(contents.devices())
            views = contents.copied(segment, buffers.one)
        contents.note(segment, sink.write_hashed(segment.begin, views))

    with _sink(prepared, direct=False) as sink:
        in_threads(write, segments(prepared.layout), 1 if prepared.location.ordered else threads)


class Staging:
    """A shard file that is written while training goes on.

    `run` is called in a thread of its own: it copies segments to buffers of the pool, and other
    threads hash and write them.

    Args:
        prepared: What is written.
        threads: That write.
        pool: Of buffers.
        handle: Is told when all is copied.
    """

    def __init__(
        self, prepared: Prepared, threads: int, pool: HostPool, handle: SaveHandle
    ) -> None:
        self._prepared, self._pool, self._handle = prepared, pool, handle
        self._threads = 1 if prepared.location.ordered else threads
        self._failed: list[BaseException] = []
        self._queue: queue.SimpleQueue[tuple[Segment, Tensor, list[Any]] | None]
        self._queue = queue.SimpleQueue()
        # The copies must come behind what training has enqueued so far.
        self._streams: list[Any] = []
        cuda: Any = torch.cuda
        for device in prepared.contents.devices():
            if device.type == "cuda":
                stream = cuda.Stream(device)
                stream.wait_stream(torch.cuda.current_stream(device))
                self._streams.append(stream)

    def run(self) -> None:
        """Copy and write everything; tell the handle when all is copied."""
        if not self._prepared.layout.slices:
            self._handle._set_staged([])
            return
        with _sink(self._prepared, direct=True) as sink:
            writers = [
                threading.Thread(target=self._write, args=(sink,), name="hfai-checkpoint-write")
                for _ in range(self._threads)
            ]
            for writer in writers:
                writer.start()
            try:
                self._copy_all()
            except BaseException as error:
                self._failed.append(error)
            finally:
                for _ in writers:
                    self._queue.put(None)
                for writer in writers:
                    writer.join()
                self._give_back_rest()
            if self._failed:
                raise self._failed[0]

    def _copy_all(self) -> None:
        with contextlib.ExitStack() as stack:
            for stream in self._streams:
                stack.enter_context(torch.cuda.stream(stream))
            todo = list(segments(self._prepared.layout))
            if self._streams:
                self._pool.expect(len(todo), locking(self._streams[0].device))
            for segment in todo:
                buffer = self._pool.acquire(lambda: bool(self._failed))
                if buffer is None:
                    return
                self._prepared.contents.copy(segment, buffer)
                self._queue.put((segment, buffer, self._record()))
            self._handle._set_staged(self._record())

    def _record(self) -> list[Any]:
        return [stream.record_event() for stream in self._streams]

    def _write(self, sink: Sink) -> None:
        while (item := self._queue.get()) is not None:
            segment, buffer, events = item
            try:
                for event in events:  # also of a save that failed: the buffer is used again
                    event.synchronize()
                if not self._failed:
                    contents = self._prepared.contents
                    views = contents.copied(segment, buffer)
                    contents.note(segment, sink.write_hashed(segment.begin, views))
            except BaseException as error:
                self._failed.append(error)
            finally:
                self._pool.release(buffer)

    def _give_back_rest(self) -> None:
        while not self._queue.empty():
            item = self._queue.get()
            if item is not None:
                for event in item[2]:
                    event.synchronize()
                self._pool.release(item[1])


def _buffer(devices: set[torch.device]) -> Tensor:
    pinned = any(device.type == "cuda" for device in devices)
    return torch.empty(SEGMENT, dtype=torch.uint8, pin_memory=pinned)


def _synchronize(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()
