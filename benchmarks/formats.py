"""The formats that records.py compares: how each is written, and how random batches are read.

A format is written to a directory of its own and opened anew for every turn, so that no mapping of
an earlier turn keeps pages in memory. Each is used as its documentation says for random access,
without compression, and takes a batch by its own call for that where it has one; records come back
as bytes where the format gives bytes. WebDataset, TFRecord and a shuffled litdata can only be
streamed, through a buffer.
"""

from __future__ import annotations

import itertools
import os
import random
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.libaio import LibaioReader
from ffrecord import FileReader, FileWriter

Read = Callable[[list[int]], Sequence[Any]]
Records = Callable[[], Iterator[bytes]]

# One file a record is as many inodes: no more than this of a profile is written so.
MOST_FILES = 10_000
BUFFER = 1000  # records of a stream's shuffle buffer


class Format(NamedTuple):
    """A way to keep and read records.

    Attributes:
        write: Makes files in an empty directory.
        open: Opens them; gives a function that reads a batch.
        random: False: `open`'s function ignores the indices and gives the next records of a stream.
    """

    write: Callable[[Path, Records], None]
    open: Callable[[Path], AbstractContextManager[Read]]
    random: bool = True


def _write_ffr(directory: Path, records: Records) -> None:
    with FileWriter(directory / "records.ffr") as writer:
        for record in records():
            writer.write_one(record)


def ffr(engine: str, check_data: bool = True) -> Callable[[Path], AbstractContextManager[Read]]:
    """Return how ours is opened."""

    @contextmanager
    def opened(directory: Path) -> Iterator[Read]:
        with FileReader(directory / "records.ffr", check_data, engine=engine) as reader:
            yield reader.read

    return opened


@contextmanager
def plain(directory: Path) -> Iterator[Read]:
    """Open a loop of `os.pread`, without checksums."""
    path = directory / "records.ffr"
    with FileReader(path) as reader:
        offsets = reader.get_offsets(0).tolist()
    descriptor = os.open(path, os.O_RDONLY)
    try:
        yield lambda batch: [
            os.pread(descriptor, offsets[i + 1] - offsets[i], offsets[i]) for i in batch
        ]
    finally:
        os.close(descriptor)


@contextmanager
def original(directory: Path) -> Iterator[Read]:
    """Open the original's way."""
    reader = LibaioReader(directory / "records.ffr", check_data=True)
    try:
        yield reader.read
    finally:
        reader.close()


def _write_files(directory: Path, records: Records) -> None:
    for index, record in enumerate(itertools.islice(records(), MOST_FILES)):
        folder = directory / f"{index // 1000:05d}"
        folder.mkdir(exist_ok=True)
        (folder / f"{index:08d}").write_bytes(record)


@contextmanager
def _files(directory: Path) -> Iterator[Read]:
    root, there = str(directory), sum(len(names) for _, _, names in os.walk(directory))

    def read(batch: list[int]) -> list[bytes]:
        found = []
        for index in batch:
            index %= there
            with open(f"{root}/{index // 1000:05d}/{index:08d}", "rb", buffering=0) as file:
                found.append(file.read())
        return found

    yield read


def _write_array_record(directory: Path, records: Records) -> None:
    from array_record.python import array_record_module

    writer = array_record_module.ArrayRecordWriter(
        str(directory / "records.array_record"), "group_size:1,uncompressed"
    )
    for record in records():
        writer.write(record)
    writer.close()


@contextmanager
def _array_record(directory: Path) -> Iterator[Read]:
    from array_record.python import array_record_module

    reader = array_record_module.ArrayRecordReader(
        str(directory / "records.array_record"), options="readahead_buffer_size:0"
    )
    try:
        yield reader.read
    finally:
        reader.close()


def _write_bagz(directory: Path, records: Records) -> None:
    import bagz

    with bagz.Writer(str(directory / "records.bag")) as writer:
        for record in records():
            writer.write(record)


@contextmanager
def _bagz(directory: Path) -> Iterator[Read]:
    import bagz

    yield bagz.Reader(str(directory / "records.bag")).read_indices


def _write_lance(directory: Path, records: Records) -> None:
    import lance
    import pyarrow

    schema = pyarrow.schema([("data", pyarrow.large_binary())])

    def batches() -> Iterator[Any]:
        rows = records()
        while part := list(itertools.islice(rows, 500)):
            yield pyarrow.record_batch([pyarrow.array(part, pyarrow.large_binary())], schema)

    lance.write_dataset(batches(), str(directory / "records.lance"), schema=schema)


@contextmanager
def _lance(directory: Path) -> Iterator[Read]:
    import lance

    dataset = lance.dataset(str(directory / "records.lance"))
    yield lambda batch: dataset.take(batch, columns=["data"]).column("data")


def _write_lmdb(directory: Path, records: Records) -> None:
    import lmdb

    with lmdb.open(str(directory), map_size=16 << 30) as environment:
        rows = enumerate(records())
        while part := list(itertools.islice(rows, 2000)):
            with environment.begin(write=True) as transaction:
                for index, record in part:
                    transaction.put(struct.pack(">Q", index), record, append=True)


@contextmanager
def _lmdb(directory: Path) -> Iterator[Read]:
    import lmdb

    # Without its own readahead, which is for data in order.
    with lmdb.open(str(directory), readonly=True, lock=False, readahead=False) as environment:

        def read(batch: list[int]) -> list[Any]:
            with environment.begin() as transaction:
                return [transaction.get(struct.pack(">Q", index)) for index in batch]

        yield read


def _write_mds(directory: Path, records: Records) -> None:
    from streaming import MDSWriter

    with MDSWriter(out=str(directory), columns={"data": "bytes"}) as writer:
        for record in records():
            writer.write({"data": record})


@contextmanager
def _mds(directory: Path) -> Iterator[Read]:
    from streaming import LocalDataset

    dataset = LocalDataset(str(directory))
    yield lambda batch: [dataset[index]["data"] for index in batch]


def _write_webdataset(directory: Path, records: Records) -> None:
    import webdataset

    with webdataset.ShardWriter(str(directory / "%06d.tar"), maxcount=2000, verbose=0) as writer:
        for index, record in enumerate(records()):
            writer.write({"__key__": f"{index:08d}", "bin": record})


@contextmanager
def _webdataset(directory: Path) -> Iterator[Read]:
    import webdataset

    shards = [str(path) for path in sorted(directory.glob("*.tar"))]
    stream = iter(webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(BUFFER).repeat())
    yield lambda batch: [sample["bin"] for sample in itertools.islice(stream, len(batch))]


def _write_tfrecord(directory: Path, records: Records) -> None:
    import tfrecord

    writer = tfrecord.TFRecordWriter(str(directory / "records.tfrecord"))
    for record in records():
        writer.write({"data": (record, "byte")})
    writer.close()


@contextmanager
def _tfrecord(directory: Path) -> Iterator[Read]:
    from tfrecord import iterator_utils, reader

    def forever() -> Iterator[Any]:
        while True:
            yield from reader.tfrecord_loader(
                str(directory / "records.tfrecord"), None, {"data": "byte"}
            )

    stream = iterator_utils.shuffle_iterator(forever(), BUFFER)
    yield lambda batch: [sample["data"] for sample in itertools.islice(stream, len(batch))]


def _write_litdata(directory: Path, records: Records) -> None:
    from litdata.streaming.writer import BinaryWriter

    writer = BinaryWriter(str(directory), chunk_bytes=64 << 20)
    index = -1
    for index, record in enumerate(records()):
        writer[index] = record
    writer.done()
    writer.merge()


@contextmanager
def _litdata(directory: Path) -> Iterator[Read]:
    from litdata import StreamingDataset

    dataset = StreamingDataset(str(directory), shuffle=False)
    yield lambda batch: [dataset[index] for index in batch]


FORMATS = {
    "ffrecord": Format(_write_ffr, ffr("auto")),
    "array_record": Format(_write_array_record, _array_record),
    "bagz": Format(_write_bagz, _bagz),
    "Lance": Format(_write_lance, _lance),
    "LMDB": Format(_write_lmdb, _lmdb),
    "MDS": Format(_write_mds, _mds),
    "litdata": Format(_write_litdata, _litdata),
    "a file a record": Format(_write_files, _files),
    "WebDataset, a stream": Format(_write_webdataset, _webdataset, random=False),
    "TFRecord, a stream": Format(_write_tfrecord, _tfrecord, random=False),
}
MODULES = {
    "array_record": "array_record",
    "bagz": "bagz",
    "Lance": "lance",
    "LMDB": "lmdb",
    "MDS": "streaming",
    "litdata": "litdata",
    "WebDataset, a stream": "webdataset",
    "TFRecord, a stream": "tfrecord",
}
PACKAGES = (
    "array_record", "bagz", "pylance", "lmdb", "mosaicml-streaming", "litdata", "webdataset",
    "tfrecord",
)  # fmt: skip


def made(count: int, mean: int) -> Records:
    """Return how the records of a profile are made: lognormal sizes, random bytes, always the same.

    Args:
        count: How many.
        mean: Their mean size in bytes.
    """
    noise = random.Random(0).randbytes(mean * 20)

    def records() -> Iterator[bytes]:
        source = random.Random(1)
        for _ in range(count):
            size = min(int(mean * source.lognormvariate(-0.125, 0.5)), mean * 10)
            start = source.randrange(len(noise) - size)
            yield noise[start : start + size]

    return records
