"""The host's part of all-reduces on GPUs, on a machine without one: the driver is a stand-in.

What only a GPU can show (order among torch's streams, rates, that no kernel runs) is in tests/gpu.
HFREDUCE_KILL_ROUNDS=200 lengthens the test that kills ranks at random points (pytest --timeout=0).
"""

from __future__ import annotations

import ctypes
import os
import random
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hfreduce import dtypes, exchange, is_available, segment
from tests.hfreduce.ranks import Ranks, reducer, run

if is_available():
    from hfreduce import _engine
    from hfreduce._engine import CudaPath

pytestmark = [
    pytest.mark.skipif(not is_available(), reason="needs hfreduce's native engine"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="the real driver is here: tests/gpu"),
]

KILL_ROUNDS = int(os.environ.get("HFREDUCE_KILL_ROUNDS", "2"))
CHUNK = 256 << 10
# Nothing, less than a cache line, one chunk that the server adds, several, and as many as make the
# first and the last ones smaller and slots be used again.
SIZES = [0, 1, 1000, 65_536, 131_073, 1_000_003]


class Gpu:
    """What `CudaReducer` is on a GPU, without torch's part."""

    def __init__(
        self, rank: int, world: int, store: str, driver: str, words: bool, timeout: float = 20
    ) -> None:
        ctypes.CDLL(driver)  # the engine gets it under its name
        self.reducer = reducer(rank, world, store, timeout=timeout)
        meeting = exchange.through_collectives(self.reducer)
        layout = segment.Settings(chunk_bytes=CHUNK, threads=1, slots=4)
        self.group, _, ended = segment.connect(
            meeting, rank, self.reducer._members, layout, timeout
        )
        assert ended[0] == 0
        self.path = CudaPath(self.group, 0, words, 2)
        assert self.path.flags == words
        self.next = 1
        self.reducer.barrier()

    def start(self, tensor: Tensor, op: str = "sum") -> int:
        """Announce and enqueue an all-reduce; return the number that it ends before."""
        dtype, number = dtypes.check(tensor.dtype, op)
        first = self.next
        self.next += self.path.chunks(tensor.numel(), dtype)
        call = tensor.data_ptr(), tensor.numel(), dtype, number, first
        self.path.submit(*call)
        self.path.enqueue(*call)
        return self.next


def data(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(count + rank)
    return (torch.randn(count, generator=generator) * 5).to(dtype)


def sums(rank: int, world: int, store: str, driver: str, words: bool) -> None:
    """Calls of all sizes follow each other without a wait between them, and all have their sums."""
    gpu = Gpu(rank, world, store, driver, words)
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        calls = []
        for count in SIZES * 2:
            parts = [data(peer, count, dtype) for peer in range(world)]
            wide = torch.float32 if dtype.is_floating_point else dtype
            total = parts[0].to(wide)
            for part in parts[1:]:
                total = total + part.to(wide)
            calls.append((gpu.start(parts[rank]), parts[rank], total.to(dtype)))
        for end, found, expected in calls:
            assert gpu.path.wait(end) == (0, -1, False)
            assert torch.equal(found, expected), (dtype, found.numel())
    gpu.reducer.barrier()
    gpu.path.close()


def left_anywhere(rank: int, world: int, store: str, driver: str) -> None:
    """Wherever sums are left for the GPU, they are the same; an unknown place is named."""
    for place in ("size", "shared", "sums", "memory", "core"):
        os.environ["HFREDUCE_CACHES"] = place
        gpu = Gpu(rank, world, store, driver, words=True)
        for count in (1000, 1_000_003, 9_000_001):  # the last beyond 32 MiB
            tensor = torch.full((count,), rank + 1.0)
            assert gpu.path.wait(gpu.start(tensor))[0] == 0
            assert (tensor == world * (world + 1) / 2).all(), (place, count)
        gpu.reducer.barrier()
        gpu.path.close()
    os.environ["HFREDUCE_CACHES"] = "attic"
    with pytest.raises(RuntimeError, match="HFREDUCE_CACHES=attic is not known: use size, shared"):
        Gpu(rank, world, store, driver, words=True)


def dies(rank: int, world: int, store: str, driver: str, words: bool) -> None:
    """The last rank dies in the middle: the others' streams are let go, and they hear of it."""
    gpu = Gpu(rank, world, store, driver, words)
    tensors = [data(rank, 1_000_003, torch.float32) for _ in range(4)]
    ends = [gpu.start(tensor) for tensor in tensors[: 2 if rank == world - 1 else 4]]
    if rank == world - 1:
        os._exit(0)
    begun = time.monotonic()
    reason, who, _ = gpu.path.wait(ends[-1])
    assert (reason, who) == (1, world - 1), (reason, who)
    assert time.monotonic() - begun < 5
    end = gpu.start(tensors[0])  # it ends at once, though nobody serves it
    assert gpu.path.wait(end)[0] == 1
    gpu.path.close()  # waits for the streams


def _hold(driver: str, seconds: float) -> None:
    ctypes.CDLL(driver).hold_copies_to_the_gpu(ctypes.c_double(seconds))


def dies_with_sums_to_fetch(rank: int, world: int, store: str, driver: str) -> float:
    """The last rank dies when the others have the sums of a call and it has not."""
    gpu = Gpu(rank, world, store, driver, words=True)
    if rank == world - 1:
        _hold(driver, 20.0)
    first, second = (data(rank, 1_000, torch.float32) for _ in range(2))
    end = gpu.start(first)
    if rank == world - 1:
        gpu.reducer.barrier()  # the others have the sums
        os._exit(0)
    assert gpu.path.wait(end)[0] == 0
    gpu.reducer.barrier()
    while _engine.start_time(gpu.reducer._members[-1].pid) >= 0:
        time.sleep(0.001)
    begun = time.monotonic()
    assert gpu.path.wait(gpu.start(second))[:2] == (1, world - 1)
    took = time.monotonic() - begun
    gpu.path.close()
    return took


def stops_with_sums_to_fetch(rank: int, world: int, store: str, driver: str) -> bool:
    """A rank is stopped while sums are on their way to it, and goes on when others gave it up."""
    gpu = Gpu(rank, world, store, driver, words=True)
    gpu.group.set_timeout(0.2)
    first = torch.full((1000,), rank + 1.0)
    if rank == 1:
        _hold(driver, 0.15)
    end = gpu.start(first)
    if rank == 1:
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGSTOP)
        said = gpu.path.wait(end)[0]
        return said == 2 or (said == 0 and bool((first == 3).all()))
    assert gpu.path.wait(end)[0] == 0
    second = torch.full((1_000_003,), 7.0)  # it goes over all slots
    assert gpu.path.wait(gpu.start(second))[:2] == (2, 1)
    time.sleep(0.05)
    os.kill(gpu.reducer._members[1].pid, signal.SIGCONT)
    return True


def comes_late(rank: int, world: int, store: str, driver: str) -> float:
    """The last rank comes when the others have given it up: all hear of it, it too."""
    gpu = Gpu(rank, world, store, driver, words=True)
    gpu.group.set_timeout(0.3)
    if rank == world - 1:
        time.sleep(1.5)
    tensor = data(rank, 1000, torch.float32)
    begun = time.monotonic()
    assert gpu.path.wait(gpu.start(tensor))[:2] == (2, world - 1)
    took = time.monotonic() - begun
    gpu.path.close()
    return took


def for_ever(rank: int, world: int, store: str, driver: str, seed: int) -> tuple[int, int]:
    """Keep calls of all sizes under way until one fails; return why and who is to blame."""
    gpu = Gpu(rank, world, store, driver, words=seed % 4 != 0, timeout=3)
    draw = random.Random(seed)  # the same on all ranks
    calls: list[tuple[int, Tensor]] = []
    while True:
        count = draw.choice([0, 10, 3000, 100_000, 400_000])
        tensor = torch.full((count,), rank + 1.0)
        calls.append((gpu.start(tensor), tensor))
        if len(calls) > draw.randrange(1, 5):
            end, tensor = calls.pop(0)
            reason, who, _ = gpu.path.wait(end)
            if reason:
                gpu.path.close()  # waits for the streams
                return reason, who
            assert (tensor == world * (world + 1) / 2).all()


def differs(rank: int, world: int, store: str, driver: str) -> None:
    """A rank calls with another size: all hear of it."""
    gpu = Gpu(rank, world, store, driver, words=True)
    tensor = data(rank, 5000 + (rank == 1), torch.float32)
    end = gpu.start(tensor)
    assert gpu.path.wait(end)[0] == 4
    gpu.path.close()


@pytest.fixture(scope="module")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, str]:
    """Return two drivers, one with words and one without."""
    source = Path(__file__).with_name("driver.cpp")
    built, compiling = {}, []
    for words in (True, False):
        built[words] = str(tmp_path_factory.mktemp("driver") / "libcuda.so.1")
        command = ["c++", "-O1", "-std=c++17", "-shared", "-fPIC", "-pthread", str(source)]
        command += ["-Wl,-soname,libcuda.so.1", "-o", built[words]]
        compiling.append(subprocess.Popen(command + ([] if words else ["-DNO_WORDS"])))
    assert [process.wait() for process in compiling] == [0, 0]
    return built


@pytest.mark.parametrize(("world", "words"), [(2, True), (3, True), (2, False)])
def test_sums_of_all_sizes_have_the_defined_bits(
    drivers: dict[bool, str], world: int, words: bool
) -> None:
    run(sums, world, drivers[words], words)


def test_wherever_sums_are_left_they_are_the_same(drivers: dict[bool, str]) -> None:
    run(left_anywhere, 2, drivers[True])


@pytest.mark.parametrize("words", [True, False])
def test_when_a_rank_dies_the_others_hear_and_their_streams_run_dry(
    drivers: dict[bool, str], words: bool
) -> None:
    ended = Ranks(dies, 3, drivers[words], words).join()
    assert [end.error for end in ended] == ["", "", "Died"], ended


def test_nobody_waits_for_a_dead_rank_to_fetch_its_sums(drivers: dict[bool, str]) -> None:
    for end in Ranks(dies_with_sums_to_fetch, 3, drivers[True]).join()[:2]:
        assert not end.error, end.text
        assert end.value < 0.5  # the dead one is looked for every 20 ms


def test_when_a_rank_is_killed_at_any_point_all_others_name_it_and_their_streams_run_dry(
    drivers: dict[bool, str],
) -> None:
    draw = random.Random(int(time.time()))
    for turn in range(KILL_ROUNDS):
        world, seed = draw.choice([2, 3]), draw.randrange(1000)
        victim, delay = draw.randrange(world), 0.2 + draw.random() * 0.8
        ranks = Ranks(for_ever, world, drivers[seed % 4 != 0], seed)
        time.sleep(delay)
        ranks.kill(victim)
        killed = time.monotonic()
        ended = ranks.join(30)
        took = time.monotonic() - killed
        where = f"turn {turn}: {world} ranks, rank {victim} killed after {delay:.3f} s, seed {seed}"
        for rank, end in enumerate(ended):
            if rank == victim:
                continue
            if end.error:  # it died while the groups were made
                assert end.error in ("DeadPeerError", "LatePeerError"), f"{where}\n{end.text}"
                assert f"rank {victim}" in end.text.splitlines()[-1], f"{where}\n{end.text}"
            else:
                assert end.value == (1, victim), where
        late = any(end.error == "LatePeerError" for end in ended)
        assert took < (7 if late else 4), f"{where}: {took:.1f} s"


def test_a_rank_that_was_given_up_takes_no_sums_that_others_have_written_over(
    drivers: dict[bool, str],
) -> None:
    assert run(stops_with_sums_to_fetch, 2, drivers[True]) == [True, True]


def test_a_late_rank_is_named_by_all_within_the_timeout(drivers: dict[bool, str]) -> None:
    took = run(comes_late, 3, drivers[True])
    assert all(0.2 < seconds < 1.4 for seconds in took[:2]), took


def test_ranks_that_call_with_other_sizes_hear_of_it(drivers: dict[bool, str]) -> None:
    run(differs, 2, drivers[True])
