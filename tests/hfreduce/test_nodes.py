"""All-reduces over several nodes: groups of processes that are told to be on different ones.

HFREDUCE_KILL_ROUNDS=200 lengthens the test that kills ranks at random points (pytest --timeout=0).
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import reduce
from pathlib import Path

import pytest
import torch
from benchmarks.harness import links
from torch import Tensor
from torch import distributed as dist

import hfreduce
from hfreduce.layout import Layout
from tests.hfreduce.ranks import Ranks, drop_group, leftovers, run

PIECE = 64 << 10
KILL_ROUNDS = int(os.environ.get("HFREDUCE_KILL_ROUNDS", "2"))


def connected(
    rank: int,
    world: int,
    store: str,
    nodes: Sequence[int],
    timeout: float = 20,
    piece_bytes: int = PIECE,
    name: str = "nodes",
    network: str = "tcp",
) -> hfreduce.HierarchicalReducer:
    """Return a rank's reducer; `nodes[rank]` is where it pretends to be."""
    os.environ["HFREDUCE_NODE"] = str(nodes[rank])
    # torch's gloo looks up the host's name, which containers may not resolve.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    files = dist.FileStore(store, world)
    return hfreduce.HierarchicalReducer(
        files,
        rank,
        world,
        timeout=timeout,
        piece_bytes=piece_bytes,
        name=name,
        network=network,
    )


def data(rank: int, count: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(rank)
    return (torch.randn(count, generator=generator) * 5).to(dtype)


def defined(parts: list[Tensor], nodes: Sequence[int], op: str) -> Tensor:
    """Return the result as it is defined: by node, then by nodes, and rounded once."""
    wide = torch.float32 if parts[0].is_floating_point() else parts[0].dtype
    combine = torch.maximum if op == "max" else torch.add
    of_node = [
        reduce(combine, [p.to(wide) for p, at in zip(parts, nodes, strict=True) if at == node])
        for node in sorted(set(nodes))
    ]
    total = reduce(combine, of_node)
    return (total / len(parts) if op == "avg" else total).to(parts[0].dtype)


def sums(rank: int, world: int, store: str, nodes: list[int], network: str) -> tuple[int, int]:
    group = connected(rank, world, store, nodes, network=network)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        for count in (0, 1, 1000, 100_001):
            parts = [data(peer, count, dtype) for peer in range(world)]
            for op in ("sum", "max", "avg"):
                if op == "avg" and not dtype.is_floating_point:
                    continue
                result = parts[rank].clone()
                group.all_reduce(result, op)
                assert torch.equal(result.float(), defined(parts, nodes, op).float()), (
                    dtype,
                    count,
                    op,
                )
    # Where the sum is more than the type holds, and the average is not.
    large = torch.full((50_001,), 30_000, dtype=torch.float16)
    group.all_reduce(large, "avg")
    assert (large == 30_000).all()
    group.barrier()
    return group.layout.columns, len(group.layout.nodes)


@pytest.mark.parametrize(
    ("nodes", "layout", "network"),
    [
        ([0, 0, 1, 1], (2, 2), "tcp"),
        ([0, 1, 2], (1, 3), "gloo"),
        ([0, 1, 0, 0, 1], (2, 2), "tcp"),
        ([0, 0], (2, 1), "tcp"),
    ],
    ids=["2x2", "3x1 by gloo", "3+2", "one node"],
)
def test_sums_have_the_defined_bits_on_every_rank_of_every_node(
    nodes: list[int], layout: tuple[int, int], network: str
) -> None:
    assert run(sums, len(nodes), nodes, network) == [layout] * len(nodes)


def in_order(rank: int, world: int, store: str) -> None:
    group = connected(rank, world, store, [0, 0, 1, 1])
    tensors = [torch.full((50_000 * (i % 3) + 7,), float(rank + i)) for i in range(12)]
    strided = torch.full((300, 400), float(rank)).t()[:, 1:]
    handles = [group.all_reduce(tensor, async_op=True) for tensor in tensors]
    group.all_reduce(strided)
    for i, (tensor, handle) in enumerate(zip(tensors, handles, strict=True)):
        assert handle is not None
        handle.wait()
        assert (tensor == 6 + 4 * i).all()
    assert (strided == 6).all()
    group.barrier()


def test_asynchronous_calls_and_strided_tensors_are_reduced_in_order() -> None:
    run(in_order, 4)


def dies(rank: int, world: int, store: str) -> tuple[str, float]:
    group = connected(rank, world, store, [0, 0, 1, 1], timeout=15)
    tensor = torch.ones(500_000)
    group.all_reduce(tensor)
    for turn in range(10**6):
        if rank == 3 and turn == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            group.all_reduce(tensor)
        except hfreduce.PeerError as error:
            with pytest.raises(hfreduce.PeerError):
                group.all_reduce(tensor)
            return str(error), time.monotonic() - start
    raise AssertionError


def test_when_a_node_loses_a_rank_every_other_rank_raises_and_nothing_is_left() -> None:
    ended = Ranks(dies, 4).join()
    for rank in (0, 1, 2):
        assert not ended[rank].error, ended[rank].text
        text, seconds = ended[rank].value
        assert seconds < 5, text
    # Who was connected to it, and who shared memory with it, name it.
    assert "rank 3" in ended[2].value[0]
    assert leftovers() == []


def for_ever(rank: int, world: int, store: str, seed: int) -> None:
    """Call all-reduces of all sizes until something breaks; nothing wrong may come of it."""
    group = connected(rank, world, store, [0, 0, 0, 1, 1], timeout=4)
    draw = random.Random(seed)  # the same on all ranks
    while True:
        count = draw.choice([0, 10, 3000, 20_000, 100_000, 400_000])
        tensors = [torch.ones(count) for _ in range(draw.choice([1, 1, 3]))]
        handles = [group.all_reduce(tensor, async_op=len(tensors) > 1) for tensor in tensors]
        for tensor, handle in zip(tensors, handles, strict=True):
            if handle is not None:
                handle.wait()
            assert (tensor == world).all()


def test_when_a_rank_of_a_node_is_killed_at_any_point_all_others_raise_in_time() -> None:
    draw = random.Random(int(time.time()))
    for turn in range(KILL_ROUNDS):
        victim, delay = draw.randrange(5), 0.2 + draw.random() * 1.2
        ranks = Ranks(for_ever, 5, draw.randrange(1000))
        time.sleep(delay)
        ranks.kill(victim)
        killed = time.monotonic()
        ended = ranks.join(30)
        took = time.monotonic() - killed
        where = f"turn {turn}: rank {victim} killed after {delay:.3f} s, noticed after {took:.1f} s"
        for rank, end in enumerate(ended):
            if rank != victim:
                # ConnectionError: it died before all had connected.
                assert end.error in ("DeadPeerError", "LatePeerError", "ConnectionError"), (
                    f"{where}\n{end.text}"
                )
        assert took < 4 + 4, where
        assert leftovers() == [], where


def stops(rank: int, world: int, store: str, network: str) -> float:
    group = connected(rank, world, store, [0, 0, 1], timeout=1.5, network=network)
    group.all_reduce(torch.ones(10))
    if rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    start = time.monotonic()
    with pytest.raises(hfreduce.PeerError, match="rank 2" if rank == 0 else "rank 0"):
        group.all_reduce(torch.ones(10))
    return time.monotonic() - start


@pytest.mark.parametrize("network", ["tcp", "gloo"])
def test_a_node_that_hangs_is_named_within_the_timeout(network: str) -> None:
    ranks = Ranks(stops, 3, network)
    pipes = ranks._pipes[:2]
    for pipe in pipes:
        assert pipe.poll(20)
    os.kill(ranks.pid(2), signal.SIGKILL)
    ended = ranks.join(5)
    for rank in (0, 1):
        assert not ended[rank].error, ended[rank].text
        assert ended[rank].value < 2.5


def test_a_layout_has_as_many_columns_as_the_smallest_node_has_ranks() -> None:
    layout = Layout.of(["b", "a", "b", "b", "a"])
    assert layout == Layout([[0, 2, 3], [1, 4]], 2)
    assert [layout.of_rank(rank) for rank in range(5)] == [(0, 0), (1, 0), (0, 1), (0, 2), (1, 1)]


def refusals(rank: int, world: int, store: str) -> None:
    files = dist.FileStore(store, world)
    with pytest.raises(ValueError, match="use one of tcp, gloo, mpi, nccl"):
        hfreduce.HierarchicalReducer(files, rank, world, network="carrier pigeons")
    with pytest.raises(ValueError, match="piece_bytes=3 is less"):
        hfreduce.HierarchicalReducer(files, rank, world, piece_bytes=3)
    with pytest.raises(ConnectionError, match=r"rank 1 network='tcp', piece_bytes=65600"):
        connected(rank, world, store, [0, 1], piece_bytes=PIECE + 64 * rank)
    group = connected(rank, world, store, [0, 1])
    with pytest.raises(TypeError, match="complex64 cannot be reduced"):
        group.all_reduce(torch.ones(3, dtype=torch.complex64))
    if (child := os.fork()) == 0:
        with pytest.raises(RuntimeError, match="which forked this one"):
            group.all_reduce(torch.ones(3))
        os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    group.barrier()
    group.close()
    with pytest.raises(RuntimeError, match="closed"):
        group.all_reduce(torch.ones(3))


def test_what_makes_no_sense_is_refused_in_words() -> None:
    run(refusals, 2)


EXPECTED = [
    "all_reduce (sum) of 100 int32",
    "all_reduce (max) of 100 float32",
    "all_reduce (sum) of 200 float32",
    "all_reduce (sum) of 100000 float32",
    "all_reduce (sum) of 0 float32",
    "barrier",
]
ONES = torch.ones(100)
CALLS = {
    "dtype": (torch.ones(100, dtype=torch.int32), "sum"),
    "op": (ONES, "max"),
    "size": (torch.ones(200), "sum"),
    "pieces": (torch.ones(100_000), "sum"),
    "nothing": (torch.ones(0), "sum"),
}


def differ(rank: int, world: int, store: str) -> list[tuple[str, int]]:
    texts = []
    for who in ((3, 4), (4,), (2,)):  # a node; one with a network; one without
        for name, (tensor, op) in {**CALLS, "barrier": (ONES, "")}.items():
            group = connected(rank, world, store, [0, 0, 0, 1, 1], name=f"{name} {who}")
            given, asked = (tensor.clone(), op) if rank in who else (ONES.clone(), "sum")
            with pytest.raises(hfreduce.MismatchError) as raised:
                group.all_reduce(given, asked) if asked else group.barrier()
            assert torch.equal(given, tensor if rank in who else ONES), "something has moved"
            with pytest.raises(hfreduce.MismatchError):
                group.all_reduce(ONES.clone())
            texts.append((str(raised.value), raised.value.rank))
            group.close()
    return texts


def test_ranks_that_call_different_things_all_learn_what_before_anything_moves() -> None:
    for rank, texts in enumerate(run(differ, 5)):
        assert len(texts) == 18
        for at, (text, blamed) in enumerate(texts):
            first = ((3, 4), (4,), (2,))[at // 6][0]
            assert "all_reduce (sum) of 100 float32" in text
            assert f"rank {first} (pid" in text
            assert blamed == (0 if rank in ((3, 4), (4,), (2,))[at // 6] else first)
        for (text, _), expected in zip(texts, EXPECTED * 3, strict=True):
            assert f"{expected} (call 0)" in text


def interrupted(rank: int, world: int, store: str, network: str) -> float:
    seconds = 0.0
    for count in (10, 100_000):
        group = connected(rank, world, store, [0, 1], name=str(count), network=network)
        group.barrier()
        tensor = torch.ones(count)
        start = time.monotonic()
        if rank == 0:
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                group.all_reduce(tensor)
            with pytest.raises(RuntimeError, match="was interrupted"):
                group.all_reduce(tensor)
            seconds = max(seconds, time.monotonic() - start)
        else:
            time.sleep(0.4)
            with pytest.raises(hfreduce.PeerError, match="rank 0"):
                # The first may end well: of a small tensor rank 0 had sent its part.
                [group.all_reduce(tensor) for _ in range(2)]
        group.close()
    return seconds


@pytest.mark.parametrize("network", ["tcp", "gloo"])
def test_a_signal_ends_a_wait_for_another_node_at_once(network: str) -> None:
    assert run(interrupted, 2, network)[0] < 0.2 + 0.5


def unreached(rank: int, world: int, store: str) -> tuple[str, str, str]:
    os.environ["HFREDUCE_NODE"] = str(rank)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    files = dist.FileStore(store, world)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=world)
    state = hfreduce.HookState(network="tcp")
    said = str(hfreduce.explain(state.reducer))
    dist.barrier()
    drop_group()
    return state.unreached("cpu"), state.unreached("cuda"), said


def test_where_gradients_of_gpus_go_between_nodes_is_said() -> None:
    for cpu, cuda, said in run(unreached, 2):
        assert not cpu
        assert "those on a cuda device go by the process group" in cuda
        assert "memory within a machine, tcp between them, by 1 rank(s) of each" in said
        assert "the machines' ranks: [0]; [1]" in said


# ---- real network namespaces, each behind its own link ----


@pytest.fixture
def namespaces() -> Iterator[list[str]]:
    """Three namespaces, behind links of 500 Mbit/s and 1 ms."""
    with ExitStack() as stack:
        try:
            names = stack.enter_context(links.linked(3, "500mbit", 0.001))
        except links.UnavailableError as error:
            pytest.skip(str(error))
        yield names


def sent() -> int:
    """Return the bytes that this thread's namespace has sent."""
    lines = Path("/proc/thread-self/net/dev").read_text().splitlines()
    (line,) = [line for line in lines if line.strip().startswith(links.DEVICE)]
    return int(line.split(":")[1].split()[8])


def apart(rank: int, world: int, store: str, names: list[str], kill: bool) -> tuple[float, str]:
    links.enter(names[rank // 2])
    os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
    group = connected(rank, world, store, [0, 0, 1, 1, 2, 2], timeout=2, piece_bytes=1 << 20)
    parts = [data(peer, 1_000_003, torch.float32) for peer in range(world)]
    tensor = parts[rank].clone()
    group.all_reduce(tensor)
    assert torch.equal(tensor, defined(parts, [0, 0, 1, 1, 2, 2], "sum"))
    group.barrier()
    before, start = sent(), time.monotonic()
    tensor = parts[rank].clone()
    if not kill:
        group.all_reduce(tensor)
        group.barrier()
        return (sent() - before) / tensor.nbytes, ""
    if rank >= 4:
        # The whole node goes, and its link with it: nobody is told.
        if rank == 4:
            subprocess.run(["ip", "link", "set", "eth0", "down"], check=True)
        time.sleep(30)
    try:
        group.all_reduce(tensor)
    except hfreduce.PeerError as error:
        return time.monotonic() - start, str(error)
    raise AssertionError


def test_a_node_sends_no_more_than_it_must_whatever_its_ranks(namespaces: list[str]) -> None:
    for share, _ in run(apart, 6, namespaces, False):
        assert 4 / 3 < share < 4 / 3 * 1.1  # 2 (N - 1) / N of the tensor, and what TCP adds


def test_a_node_whose_link_is_cut_is_named_within_the_timeout(namespaces: list[str]) -> None:
    ranks = Ranks(apart, 6, namespaces, True)
    for pipe in ranks._pipes[:4]:
        assert pipe.poll(40)
    for rank in (4, 5):
        ranks.kill(rank)
    for end in ranks.join(10)[:4]:
        assert not end.error, end.text
        seconds, text = end.value
        assert seconds < 3
        assert "rank 4" in text or "rank 5" in text or "lost another node" in text
