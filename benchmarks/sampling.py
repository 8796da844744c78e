"""How good a shuffle is, and how soon a run goes on in the middle of an epoch.

    python benchmarks/sampling.py                        # writes benchmarks/results/sampling.json
    python benchmarks/sampling.py --rounds 2 --out -     # a quick look

Peers take part where they are installed (pip install webdataset mosaicml-streaming, best in an
environment of their own): WebDataset's shard shuffle and buffer, on a stream of record numbers in
place of samples, and MDS's default algorithm. Orders are of 10⁶ records in shards of 1000, a
seed a round.

- Rank correlation: Spearman's, of a record's place in the order and its place in the files; 0 for
  a uniform shuffle, whose own is about 0.001 here.
- Bunching: pairs of records of one shard within a batch of 256, over what a uniform shuffle has on
  average; 1 is ideal, above it batches hold records that stood together.
- Resuming: from a saved state in the middle of an epoch to the indices of the next batch of 256.
  torch's way is to draw the epoch's permutation again and to iterate up to the place; MDS's shuffle
  is drawn again whole, reading its files is not counted.
"""

from __future__ import annotations

import functools
import random
import sys
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # for this package

from benchmarks.harness import machine, result, ways
from ffrecord.torch import GlobalBatchSampler
from ffrecord.torch.permutation import Permutation

N, SHARD, BATCH = 10**6, 1000, 256
BUFFERS = (1000, 10_000)
# Its default is "py1e" with blocks of 2¹⁸ samples; the other is what it takes for one node.
MDS_BLOCKS = (1 << 18, 4_000_000)
Order = Callable[[int], NDArray[np.int64]]


def orders(absent: dict[str, str]) -> dict[str, Order]:
    """Return a function from a seed to an order of N records, for every way that is there."""
    found: dict[str, Order] = {
        "ffrecord": lambda seed: Permutation(N, seed)(np.arange(N)),
        "torch.randperm": lambda seed: torch.randperm(
            N, generator=torch.Generator().manual_seed(seed)
        ).numpy(),
    }
    try:
        import webdataset  # noqa: F401
    except ImportError as error:
        absent["WebDataset"] = str(error)
    else:
        for size in BUFFERS:
            found[f"WebDataset, buffer of {size:,}"] = functools.partial(webdataset_order, size)
    try:
        import streaming  # noqa: F401
    except ImportError as error:
        absent["MDS"] = str(error)
    else:
        for block in MDS_BLOCKS:
            found[f"MDS py1e, blocks of {block:,}"] = functools.partial(mds_order, block)
    return found


def webdataset_order(size: int, seed: int) -> NDArray[np.int64]:
    """Return the order of WebDataset's shuffled shards and its buffer, as its pipeline has it."""
    from webdataset.filters import shuffle

    source = random.Random(seed)
    shards = list(range(N // SHARD))
    source.shuffle(shards)
    numbers = (shard * SHARD + place for shard in shards for place in range(SHARD))
    return np.fromiter(shuffle(size, rng=source)(numbers), np.int64, N)


def mds_order(block: int, seed: int) -> NDArray[np.int64]:
    """Return the order of MDS's default algorithm for one node."""
    from streaming.base.shuffle import get_shuffle

    sizes = np.full(N // SHARD, SHARD, np.int64)
    return np.asarray(get_shuffle("py1e", sizes, 1, seed, 0, block), np.int64)


def rank_correlation(order: NDArray[np.int64]) -> float:
    """Return Spearman's correlation of places before and after, without its sign."""
    return abs(float(np.corrcoef(order, np.arange(len(order)))[0, 1]))


def bunching(order: NDArray[np.int64]) -> float:
    """Return pairs of one shard within batches over those of a uniform shuffle."""
    whole = len(order) // BATCH * BATCH
    shards = np.sort(order[:whole].reshape(-1, BATCH) // SHARD, axis=1)
    pairs = 0
    for distance in range(1, BATCH):
        same = int((shards[:, distance:] == shards[:, :-distance]).sum())
        if same == 0:
            break
        pairs += same
    expected = whole // BATCH * BATCH * (BATCH - 1) / 2 * (SHARD - 1) / (len(order) - 1)
    return pairs / expected


def resumes(n: int, absent: dict[str, str]) -> dict[str, ways.Measure]:
    """Return functions that time going on in the middle of an epoch of n records, in ms."""

    def timed(next_batch: Callable[[int], Any]) -> ways.Measure:
        def measure(turn: int) -> float:
            start = time.perf_counter()
            taken = next_batch(turn)
            elapsed = time.perf_counter() - start
            assert len(taken) == BATCH
            return elapsed * 1e3

        return measure

    def ours(turn: int) -> list[int]:
        sampler = GlobalBatchSampler(n, BATCH)
        middle = n // 2 // BATCH * BATCH
        sampler.load_state_dict({**sampler.state_dict(), "seed": turn, "consumed": middle})
        return next(iter(sampler))

    def torchs(turn: int) -> list[int]:
        generator = torch.Generator().manual_seed(turn)
        order: Iterator[int] = iter(torch.utils.data.RandomSampler(range(n), generator=generator))
        return list(islice(order, n // 2, n // 2 + BATCH))

    def mds(turn: int) -> NDArray[np.int64]:
        from streaming.base.shuffle import get_shuffle

        sizes = np.full(n // SHARD, SHARD, np.int64)
        return np.asarray(get_shuffle("py1e", sizes, 1, turn, 0)[n // 2 : n // 2 + BATCH])

    found = {"ffrecord": timed(ours)}
    # A permutation of 10⁹ numbers takes 8 GB and minutes: only the computed order goes there.
    if n <= 10**7:
        found["torch RandomSampler, iterated up to there"] = timed(torchs)
        if "MDS" not in absent:
            found["MDS py1e, drawn again"] = timed(mds)
    return found


@click.command()
@click.option("--rounds", type=click.IntRange(1), default=5, show_default=True)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=machine.ROOT / "benchmarks" / "results" / "sampling.json",
    help="The result file, or - for none.",
)
def main(rounds: int, out: Path) -> None:
    """Measure shuffles and resuming."""
    absent: dict[str, str] = {}
    shuffles = orders(absent)
    made = ways.document(
        "sampling.py",
        "Shuffle quality and resuming",
        ["--rounds", str(rounds)],
        ("webdataset", "mosaicml-streaming"),
        absent,
    )
    # Both figures are of the same orders; an order is made once.
    kept = functools.cache(lambda way, seed: shuffles[way](seed))
    for name, unit, figure in (
        ("rank correlation, 10⁶ records", "0 is ideal", rank_correlation),
        ("bunching in batches of 256", "1 is ideal", bunching),
    ):
        measures = {
            way: lambda seed, way=way, figure=figure: figure(kept(way, seed)) for way in shuffles
        }
        made["cases"].append(ways.in_turn(name, unit, measures, rounds, None, lower_is_better=True))
    kept.cache_clear()
    for n, text in ((10**6, "10⁶"), (10**7, "10⁷"), (10**9, "10⁹")):
        made["cases"].append(
            ways.in_turn(
                f"resuming at 50 % of {text} records",
                "ms",
                resumes(n, absent),
                rounds,
                "ffrecord",
                lower_is_better=True,
            )
        )
    made["complete"] = True
    if str(out) != "-":
        result.write(out, made)


if __name__ == "__main__":
    main()
