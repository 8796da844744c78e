"""Images a second out of a loader: JPEG files decoded, from record files and from other formats.

    python benchmarks/images.py                          # writes benchmarks/results/images.json
    python benchmarks/images.py --rounds 1 --out -       # a quick look

The same JPEG images (about 60 KB each, made here), the same decoding (Pillow: RGB, the middle 224 x
224), the same batches of 64 in a shuffled order, torch's loader with 0 and 2 workers that stay.
Peers take part where they are installed (pip install webdataset lmdb mosaicml-streaming
array-record, best in an environment of their own). WebDataset shuffles its shards and a buffer of
1000; all others are read in a uniform order. A figure is a whole pass, after one that is not
counted; ways take turns. "Bytes alone" leaves decoding out and looks at one byte in 64: what is
left is reading and the loader. ffrecord and ArrayRecord compare checksums there, the others do not.
All is hot (in the page cache): the disk is benchmarks/records.py's.
"""

from __future__ import annotations

import io
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from torch.utils.data import DataLoader as TorchDataLoader
from torch.utils.data import Dataset as TorchDataset

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import machine, result, ways
from ffrecord import FileWriter
from ffrecord.torch import DataLoader, Dataset, GlobalBatchSampler

BATCH = 64
SIDE = 224
SHARD = 250
WORKERS = (0, 2)
Sample = Callable[[Any], Any]


def make_images(count: int) -> list[bytes]:
    """Return JPEG files of 500 x 375 pixels: soft shapes with grain, which weigh like photos."""
    from PIL import Image

    source = np.random.default_rng(0)
    y, x = np.mgrid[0:375, 0:500].astype(np.float32) / 500
    files = []
    for _ in range(count):
        frequency, phase = source.uniform(2, 30, (3, 2)), source.uniform(0, 6, 3)
        waves = [np.sin(a * x + b * y + c) for (a, b), c in zip(frequency, phase, strict=True)]
        grain = source.normal(0, 14, (375, 500, 3))
        pixels = np.clip(np.stack(waves, -1) * 90 + 128 + grain, 0, 255).astype(np.uint8)
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, "JPEG", quality=85)
        files.append(buffer.getvalue())
    return files


def decode(data: Any) -> torch.Tensor:
    """Return the middle of an image as a uint8 tensor, shape (224, 224, 3)."""
    from PIL import Image

    image = Image.open(io.BytesIO(data)).convert("RGB")
    left, top = (image.width - SIDE) // 2, (image.height - SIDE) // 2
    return torch.from_numpy(np.array(image.crop((left, top, left + SIDE, top + SIDE))))


def weigh(data: Any) -> torch.Tensor:
    """Return the number of bytes, shape (), after a look into every cache line of them."""
    content = np.frombuffer(data, np.uint8)
    return torch.tensor(len(content) + 0 * int(content[::64].max()))


class Records(Dataset):
    """ffrecord's own: a batch is one read."""

    def __init__(self, path: Path, sample: Sample) -> None:
        super().__init__(path)
        self.sample = sample

    def process(self, indices: list[int], data: list[Any]) -> Sequence[Any]:
        """Make a tensor of each record."""
        return [self.sample(record) for record in data]


class Files(TorchDataset[Any]):
    """One file an image, as in a folder."""

    def __init__(self, directory: Path, count: int, sample: Sample) -> None:
        self.directory, self.count, self.sample = directory, count, sample

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.sample((self.directory / f"{index:06d}.jpg").read_bytes())


class Lmdb(TorchDataset[Any]):
    """One database, opened in each process on its first read."""

    def __init__(self, path: Path, count: int, sample: Sample) -> None:
        self.path, self.count, self.sample = path, count, sample
        self.environment: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        if self.environment is None:
            import lmdb

            self.environment = lmdb.open(str(self.path), readonly=True, lock=False, readahead=False)
        with self.environment.begin(buffers=True) as pairs:
            return self.sample(pairs.get(b"%06d" % index))


class ArrayRecords(TorchDataset[Any]):
    """One ArrayRecord file; a batch is one read, as with ours."""

    def __init__(self, path: Path, count: int, sample: Sample) -> None:
        self.path, self.count, self.sample = path, count, sample
        self.reader: Any = None

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[Any]:
        if self.reader is None:
            from array_record.python.array_record_module import ArrayRecordReader

            self.reader = ArrayRecordReader(str(self.path), "readahead_buffer_size:0")
        return [self.sample(data) for data in self.reader.read(indices)]


def make_ways(
    work: Path, images: list[bytes], sample: Sample, workers: int, absent: dict[str, str]
) -> dict[str, Iterable[Any]]:
    """Write the images in every format that is there, and return a loader for each."""
    count = len(images)
    options: dict[str, Any] = {"num_workers": workers, "persistent_workers": workers > 0}
    found: dict[str, Iterable[Any]] = {}

    path = work / "images.ffr"
    if not path.exists():
        with FileWriter(path, count) as writer:
            writer.write(images)
    records = Records(path, sample)
    sampler = GlobalBatchSampler(records, BATCH, tail="drop")
    found["ffrecord"] = DataLoader(records, batch_sampler=sampler, **options)

    options |= {"batch_size": BATCH, "drop_last": True}
    shuffled = {**options, "shuffle": True}
    folder = work / "files"
    if not folder.exists():
        folder.mkdir()
        for index, data in enumerate(images):
            (folder / f"{index:06d}.jpg").write_bytes(data)
    found["plain files"] = TorchDataLoader(Files(folder, count, sample), **shuffled)

    for name, add in (
        ("LMDB", _lmdb),
        ("ArrayRecord", _array_record),
        ("WebDataset", _webdataset),
        ("MDS", _mds),
    ):
        try:
            found[name] = add(work, images, sample, options, shuffled)
        except ImportError as error:
            absent[name] = str(error)
    return found


def _lmdb(work: Path, images: list[bytes], sample: Sample, options: Any, shuffled: Any) -> Any:
    import lmdb

    path = work / "lmdb"
    if not path.exists():
        size = 2 * sum(map(len, images)) + (64 << 20)
        opened = lmdb.open(str(path), map_size=size)
        with opened as environment, environment.begin(write=True) as pairs:
            for index, data in enumerate(images):
                pairs.put(b"%06d" % index, data)
    return TorchDataLoader(Lmdb(path, len(images), sample), **shuffled)


def _array_record(
    work: Path, images: list[bytes], sample: Sample, options: Any, shuffled: Any
) -> Any:
    from array_record.python.array_record_module import ArrayRecordWriter

    path = work / "images.array_record"
    if not path.exists():
        # JPEG files do not get smaller; compressing them would only cost this way time.
        writer = ArrayRecordWriter(str(path), "group_size:1,uncompressed")
        for data in images:
            writer.write(data)
        writer.close()
    return TorchDataLoader(ArrayRecords(path, len(images), sample), **shuffled)


def _webdataset(
    work: Path, images: list[bytes], sample: Sample, options: Any, shuffled: Any
) -> Any:
    import webdataset

    if not (work / "wds").exists():
        (work / "wds").mkdir()
        for start in range(0, len(images), SHARD):
            with webdataset.TarWriter(str(work / "wds" / f"{start:06d}.tar")) as writer:
                for index, data in enumerate(images[start : start + SHARD], start):
                    writer.write({"__key__": f"{index:06d}", "jpg": data})
    shards = sorted(str(path) for path in (work / "wds").glob("*.tar"))
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards)).shuffle(1000)
    dataset = dataset.map(_OfField(sample))
    return TorchDataLoader(dataset, **options)


class _OfField:
    def __init__(self, sample: Sample) -> None:
        self.sample = sample

    def __call__(self, fields: dict[str, Any]) -> Any:
        return self.sample(fields["jpg"])


def _mds(work: Path, images: list[bytes], sample: Sample, options: Any, shuffled: Any) -> Any:
    from streaming import MDSWriter, StreamingDataset

    path = work / "mds"
    if not path.exists():
        with MDSWriter(out=str(path), columns={"jpg": "bytes"}, size_limit=1 << 24) as writer:
            for data in images:
                writer.write({"jpg": data})

    class Mds(StreamingDataset):
        def __getitem__(self, index: int) -> Any:
            return sample(super().__getitem__(index)["jpg"])

    return TorchDataLoader(Mds(local=str(path), shuffle=True, batch_size=BATCH), **options)


class Pass:
    """Goes through a loader some times; a call returns images a second, and notes the cost.

    Attributes:
        cpu: Microseconds of this process's processor time an image, one for each call: less at the
            mercy of neighbours than the rate. Worker processes are not in it.
    """

    def __init__(self, loader: Iterable[Any], repeats: int) -> None:
        self.loader, self.repeats = loader, repeats
        self.cpu: list[float] = []

    def __call__(self, turn: int) -> float:
        """Go through the loader and return images a second."""
        count, cpu, start = 0, time.process_time(), time.perf_counter()
        for _ in range(self.repeats):
            count += sum(len(batch) for batch in self.loader)
        elapsed = time.perf_counter() - start
        self.cpu.append((time.process_time() - cpu) / count * 1e6)
        return count / elapsed


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option("--images", "count", type=click.IntRange(2 * SHARD), default=1024, show_default=True)
@click.option("--passes", type=click.IntRange(1), default=8, show_default=True, help="Of bytes.")
@click.option("--dir", "directory", type=click.Path(file_okay=False), help="Where files are made.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "images.json",
    help="The result file, or - for none.",
)
def main(rounds: int, count: int, passes: int, directory: str | None, out: Path) -> None:
    """Measure loaders of JPEG images."""
    torch.set_num_threads(1)  # workers and the decoder are the load; torch only stacks
    random.seed(0)
    torch.manual_seed(0)
    absent: dict[str, str] = {}
    arguments = ["--rounds", str(rounds), "--images", str(count), "--passes", str(passes)]
    packages = ("pillow", "webdataset", "lmdb", "array-record", "mosaicml-streaming")
    made = ways.document("images.py", "Loading JPEG images", arguments, packages, absent)
    images = make_images(count)
    click.echo(f"{count} images of {sum(map(len, images)) / count / 1e3:.0f} KB")
    with tempfile.TemporaryDirectory(dir=directory) as work:
        for kind, sample, repeats in (("decoded", decode, 1), ("bytes alone", weigh, passes)):
            for workers in WORKERS:
                loaders = make_ways(Path(work), images, sample, workers, absent)
                measures = {name: Pass(loader, repeats) for name, loader in loaders.items()}
                for measure in measures.values():
                    measure(0)  # workers start, files get into the page cache
                    measure.cpu.clear()
                title = f"{kind}, {workers} workers"
                case = ways.in_turn(title, "images/s", measures, rounds, "plain files")
                made["cases"].append(case)
                if workers == 0:
                    costs = {name: measure.cpu for name, measure in measures.items()}
                    made["cases"].append(
                        ways.as_case(
                            title, "µs of CPU an image", costs, "plain files", lower_is_better=True
                        )
                    )
                del loaders, measures
    made["absent"] = absent
    made["complete"] = True
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    main()
