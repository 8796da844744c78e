"""Messages between nodes by TCP: two ends in one process, each in a thread of its own."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed as dist

from hfreduce import DeadPeerError, LatePeerError
from hfreduce.network.addresses import own_address
from hfreduce.network.base import Place
from hfreduce.network.tcp import TcpNetwork


@pytest.fixture(autouse=True)
def _loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    """Two threads."""
    with ThreadPoolExecutor(2) as pool:
        yield pool


def place(store: Any, rank: int, timeout: float = 5.0) -> Place:
    return Place(rank, 2, ["rank 0", "rank 1"], [0, 1], store, timeout)


def pair(threads: ThreadPoolExecutor, timeout: float = 5.0) -> tuple[TcpNetwork, TcpNetwork]:
    store = dist.HashStore()  # type: ignore[attr-defined]
    made = [threads.submit(TcpNetwork, place(store, rank, timeout)) for rank in range(2)]
    first, second = (future.result(10) for future in made)
    return first, second


def both(threads: ThreadPoolExecutor, *calls: Callable[[], Any]) -> list[Future[Any]]:
    return [threads.submit(call) for call in calls]


def test_messages_larger_than_any_buffer_cross_each_other(threads: ThreadPoolExecutor) -> None:
    ends = pair(threads)
    given = [torch.full((10_000_000,), float(rank)) for rank in range(2)]
    taken = [torch.empty(10_000_000) for _ in range(2)]

    def cross(rank: int) -> None:
        ends[rank].exchange([(1 - rank, given[rank])], [(1 - rank, taken[rank])], lane=0)

    for future in both(threads, lambda: cross(0), lambda: cross(1)):
        future.result(20)
    assert torch.equal(taken[0], given[1])
    assert torch.equal(taken[1], given[0])
    for end in ends:
        end.close()


def test_a_message_may_be_shorter_than_its_room_and_never_longer(
    threads: ThreadPoolExecutor,
) -> None:
    first, second = pair(threads)
    frames = [torch.arange(count, dtype=torch.uint8) for count in (3, 200)]
    told = both(threads, lambda: first.tell(frames[0], 200), lambda: second.tell(frames[1], 200))
    at_first, at_second = (future.result(10) for future in told)
    assert torch.equal(at_first[1][:200], frames[1])
    assert torch.equal(at_second[0][:3], frames[0])
    first.exchange([(1, torch.ones(100, dtype=torch.uint8))], [], lane=0)
    room = torch.zeros(200, dtype=torch.uint8)
    with pytest.raises(DeadPeerError, match=r"rank 0 is lost .100 bytes came where 99 fit"):
        second.exchange([], [(0, room[:99])], lane=0)
    assert not room.any()
    first.close()
    second.close()


def test_a_node_that_hangs_up_or_is_late_is_named(threads: ThreadPoolExecutor) -> None:
    first, second = pair(threads, timeout=0.4)
    room = torch.zeros(3)
    with pytest.raises(LatePeerError, match=r"rank 1 did not send or receive within 0\.4 s"):
        first.exchange([], [(1, room)], lane=1)
    waits = threads.submit(first.exchange, [], [(1, room)], 0)
    time.sleep(0.1)
    second.close()
    with pytest.raises(DeadPeerError, match=r"rank 1 is lost .it has hung up"):
        waits.result(2)
    first.close()
    with pytest.raises(RuntimeError, match="closed"):
        first.exchange([], [(1, room)], lane=0)


def test_a_wait_takes_under_2_percent_of_a_core(threads: ThreadPoolExecutor) -> None:
    first, second = pair(threads)

    def waits() -> float:
        start = time.thread_time()
        first.exchange([], [(1, torch.zeros(3))], 0)
        return time.thread_time() - start

    used = threads.submit(waits)
    time.sleep(1.2)
    second.exchange([(0, torch.ones(3))], [], 0)
    assert used.result(5) / 1.2 < 0.02
    first.close()
    second.close()


def test_closing_ends_a_wait_in_another_thread(threads: ThreadPoolExecutor) -> None:
    first, second = pair(threads)
    waits = threads.submit(first.exchange, [], [(1, torch.zeros(3))], 0)
    time.sleep(0.1)
    first.close()
    with pytest.raises(RuntimeError, match="closed in the middle of a call"):
        waits.result(2)
    second.close()


def test_who_does_not_know_the_token_is_sent_away(threads: ThreadPoolExecutor) -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    listens = threads.submit(TcpNetwork, place(store, 0))
    _, port, address = store.get("tcp/0").decode().split(" ")
    with socket.create_connection((address, int(port))) as stranger:
        stranger.sendall(bytes(16) + (1).to_bytes(4, "big") + bytes(4))
        assert stranger.recv(1) == b""
    with socket.create_connection((address, int(port))) as stranger:
        stranger.sendall(b"GET /")
    second = TcpNetwork(place(store, 1))
    first = listens.result(10)
    told = both(
        threads,
        lambda: first.tell(torch.zeros(1, dtype=torch.uint8), 1),
        lambda: second.tell(torch.ones(1, dtype=torch.uint8), 1),
    )
    assert [[int(part[0]) for part in future.result(5)] for future in told] == [[0, 1]] * 2
    first.close()
    second.close()


def test_a_node_that_never_comes_is_a_connection_error_within_the_timeout() -> None:
    for rank in range(2):  # one that listens, and one that looks for the other's address
        store = dist.HashStore()  # type: ignore[attr-defined]
        start = time.monotonic()
        words = f"rank {rank} cannot connect to the other nodes by TCP: rank {1 - rank} did not co"
        with pytest.raises(ConnectionError, match=words):
            TcpNetwork(place(store, rank, timeout=0.3))
        assert time.monotonic() - start < 2


def test_a_node_that_died_after_it_had_given_its_address_is_named() -> None:
    store = dist.HashStore()  # type: ignore[attr-defined]
    with socket.create_server(("127.0.0.1", 0)) as door:
        store.set("tcp/0", f"{'0' * 32} {door.getsockname()[1]} 127.0.0.1")
    with pytest.raises(ConnectionError, match=r"rank 0 takes no connection .* \(.*refused\)"):
        TcpNetwork(place(store, 1))


def test_the_address_is_the_named_interfaces_or_that_which_reaches_the_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert own_address(dist.HashStore()) == "127.0.0.1"  # type: ignore[attr-defined]
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere7")
    with pytest.raises(ValueError, match=r"GLOO_SOCKET_IFNAME=nowhere7: no such interface.* lo"):
        own_address(dist.HashStore())  # type: ignore[attr-defined]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    server = dist.TCPStore("127.0.0.1", 0, 1, True)
    store = dist.PrefixStore("a", dist.PrefixStore("b", server))  # type: ignore[attr-defined]
    assert own_address(store) == "127.0.0.1"
