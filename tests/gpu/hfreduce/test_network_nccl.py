"""Sums between nodes by NCCL: two ranks that count as on two machines, each with its own GPU."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import distributed as dist

import hfreduce
from hfreduce.network.nccl import CHUNK_BYTES, TCP_BYTES, NcclNetwork
from tests.hfreduce.ranks import Ranks, run
from tests.hfreduce.test_nodes import data, defined

pytestmark = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank, and there are not two"
)


def connected(
    rank: int, world: int, store: str, nodes: Sequence[int], timeout: float = 20
) -> hfreduce.HierarchicalReducer:
    """Return a rank's reducer over NCCL; `nodes[rank]` is where it pretends to be."""
    os.environ["HFREDUCE_NODE"] = str(nodes[rank])
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    torch.cuda.set_device(nodes[rank])
    files = dist.FileStore(store, world)
    return hfreduce.HierarchicalReducer(
        files, rank, world, timeout=timeout, network="nccl", piece_bytes=3 * CHUNK_BYTES
    )


def sums(rank: int, world: int, store: str) -> None:
    nodes = [0, 1]
    group = connected(rank, world, store, nodes)
    for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int32):
        for count in (0, 1, 1_000_001, 5_000_003):
            parts = [data(peer, count, dtype) for peer in range(world)]
            for op in ("sum", "avg", "max"):
                if op == "avg" and not dtype.is_floating_point:
                    continue
                expected = defined(parts, nodes, op)
                result = parts[rank].clone()
                group.all_reduce(result, op)
                # Of two nodes: the order of a sum does not matter.
                assert torch.equal(result.float(), expected.float()), (dtype, count, op)
    pinned = torch.full((5_000_003,), rank + 1.0).pin_memory()
    group.all_reduce(pinned)
    assert (pinned == 3).all()
    handles = [group.all_reduce(torch.ones(3_000_000), async_op=True) for _ in range(3)]
    for handle in handles:
        assert handle is not None
        handle.wait()
    group.barrier()
    group.close()


def test_sums_have_the_defined_bits_on_both_nodes() -> None:
    run(sums, 2)


def dies(rank: int, world: int, store: str, timeout: float) -> tuple[str, float]:
    group = connected(rank, world, store, [0, 1], timeout=timeout)
    tensor = torch.ones(20_000_000)
    group.all_reduce(tensor)
    for turn in range(10**6):
        if rank == 1 and turn == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        start = time.monotonic()
        try:
            group.all_reduce(tensor)
        except hfreduce.PeerError as error:
            took = time.monotonic() - start
            with pytest.raises(hfreduce.PeerError):
                group.all_reduce(tensor)
            group.close()
            torch.ones(3, device="cuda").sum().item()  # the GPU goes on
            return str(error), took
    raise AssertionError


def test_a_node_that_dies_is_named_and_the_gpu_is_let_go() -> None:
    text, seconds = Ranks(dies, 2, 5.0).join(60)[0].value
    assert "rank 1" in text
    assert seconds < 6


def leaves_in_the_middle(rank: int, world: int, store: str) -> float:
    # Two processes on a busy machine may take long to come: only the call's own time is short.
    group = connected(rank, world, store, [0, 1])
    group.barrier()
    network = group._network
    assert isinstance(network, NcclNetwork)
    network.place = replace(network.place, timeout=4)
    start = time.monotonic()
    if rank == 0:  # the other never comes, after both have agreed to
        tensor = torch.ones(TCP_BYTES)
        with pytest.raises(hfreduce.LatePeerError, match="rank 1"):
            network.all_reduce(tensor, "sum", out=tensor)
        group.close()
        torch.ones(3, device="cuda").sum().item()
    else:
        time.sleep(6)
    return time.monotonic() - start


def test_a_node_that_hangs_within_nccl_is_named_within_the_timeout() -> None:
    assert 3.5 < run(leaves_in_the_middle, 2)[0] < 6
