"""Ranks stop at one boundary: whoever hears it, however far some run ahead, whoever is missing."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist

from hfai.client import agreement, receive_suspend_command
from hfai.client.agreement import Agreement
from tests.hfreduce.ranks import Ranks, leave, run


class Jittery(dist.Store):
    """A real store whose answers come late by random times, so that ranks interleave."""

    def __init__(self, store: dist.Store, seed: int) -> None:
        super().__init__()
        self._store, self._random = store, random.Random(seed)

    def __getattribute__(self, name: str) -> Any:
        if name in ("add", "check", "compare_set", "get", "set"):
            chance, store = self._random.random(), self._store
            time.sleep(0.002 * chance if chance > 0.5 else 0.0)
            return getattr(store, name)
        return super().__getattribute__(name)


def stops(
    world: int, seed: int, heard_by: dict[int, int], most: int = 4000
) -> tuple[list[int], list[int | None]]:
    """Run ranks as threads at paces of their own; return where each stopped, and was to stop."""
    store = dist.HashStore()
    reached, agreed = [0] * world, [None] * world
    errors: list[BaseException] = []

    def train(rank: int) -> None:
        pace = random.Random(1000 * seed + rank)
        try:
            slow = Jittery(store, 7 * seed + rank)
            part = Agreement(slow, rank, world, linger=0.003)
            for boundary in range(1, most):
                # They meet at times, as ranks do that wait for their GPU's result.
                time.sleep(pace.choice([0.0, 0.0, 0.0005, 0.003]))
                heard = "SIGTERM" if boundary >= heard_by.get(rank, most) else None
                reached[rank] = boundary
                if part.at_boundary(heard, timeout=60.0):
                    break
            agreed[rank] = part.stop_at
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors
    return reached, agreed


@pytest.mark.parametrize("seed", range(int(os.environ.get("HFAI_AGREEMENT_ROUNDS", "12"))))
def test_no_rank_passes_the_boundary_at_which_all_stop(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agreement, "LOOK_EVERY", 0.004)
    draw = random.Random(seed)
    world = draw.randint(2, 6)
    heard_by = {
        rank: draw.randint(1, 40) for rank in draw.sample(range(world), draw.randint(1, world))
    }
    reached, agreed = stops(world, seed, heard_by)
    assert len(set(reached)) == 1, (reached, agreed, heard_by)
    assert set(agreed) == set(reached)
    assert reached[0] >= min(heard_by.values())


def test_a_signal_that_all_ranks_get_stops_them_at_that_very_boundary() -> None:
    store = dist.HashStore()
    meet = threading.Barrier(3)
    found: list[int] = []

    def train(rank: int) -> None:
        part = Agreement(store, rank, 3)
        for boundary in range(1, 6):
            time.sleep(0.1)  # what a step takes: for as long they wait for each other
            meet.wait()
            if part.at_boundary("SIGTERM" if boundary >= 3 else None, timeout=60.0):
                found.append(boundary)
                return

    threads = [threading.Thread(target=train, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [3, 3, 3]


def test_ranks_that_never_ask_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    alone = Agreement(store, 0, 3, join_patience=0.05)
    assert not alone.at_boundary(None, 60.0)
    time.sleep(0.06)
    start = time.monotonic()
    assert alone.at_boundary("SIGTERM", 60.0)
    assert time.monotonic() - start < 0.5
    assert "suspending without rank 1, rank 2" in caplog.text


def test_a_rank_that_asks_for_the_first_time_afterwards_stops_where_the_others_do() -> None:
    store = dist.HashStore()
    early = Agreement(store, 0, 2, join_patience=0.0)
    assert [early.at_boundary(None, 60.0) for _ in range(2)] == [False, False]
    assert early.at_boundary("SIGTERM", 60.0)
    late = Agreement(store, 1, 2)
    assert [late.at_boundary(None, 60.0) for _ in range(3)] == [False, False, True]


def test_a_rank_that_comes_to_no_boundary_is_named_after_the_timeout() -> None:
    store = dist.HashStore()
    here, _ = Agreement(store, 0, 2, linger=0.01), Agreement(store, 1, 2)
    start = time.monotonic()

    def train() -> None:
        while not here.at_boundary("SIGTERM", 0.2):
            time.sleep(0.01)

    with pytest.raises(TimeoutError, match=r"rank 1 did not .* 0\.2 s .*rank 0 heard SIGTERM"):
        train()
    assert 0.2 < time.monotonic() - start < 2


def test_a_rank_that_goes_on_after_the_timeout_still_stops_with_the_others() -> None:
    store = dist.HashStore()
    early, late = Agreement(store, 0, 2, linger=0.0), Agreement(store, 1, 2)
    for _ in range(2):
        with pytest.raises(TimeoutError):
            early.at_boundary("SIGTERM", 1e-9)
    assert [late.at_boundary(None, 60.0) for _ in range(3)] == [False, False, True]
    assert early.at_boundary(None, 60.0)


def test_a_store_that_has_gone_ends_no_training(caplog: pytest.LogCaptureFixture) -> None:
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=2))
    client = dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=2))
    part = Agreement(client, 1, 2)
    assert not part.at_boundary(None, 60.0)
    del server
    assert not part.at_boundary("SIGTERM", 60.0)
    assert not part.at_boundary("SIGTERM", 60.0)
    assert caplog.text.count("does not answer") == 1
    part.leave(5.0)


@pytest.mark.parametrize("make", ["hash", "file", "tcp"])
def test_every_kind_of_store_will_do_and_may_be_used_again(make: str, tmp_path: Path) -> None:
    store: dist.Store
    if make == "hash":
        store = dist.HashStore()
    elif make == "file":
        store = dist.FileStore(str(tmp_path / "store"), 2)
    else:
        store = dist.TCPStore("127.0.0.1", 0, None, True)
    for _ in range(2):
        parts = [Agreement(store, rank, 2, linger=0.0) for rank in range(2)]
        assert [part.at_boundary(None, 60.0) for part in parts] == [False, False]
        assert [part.at_boundary("SIGTERM", 60.0) for part in parts] == [False, False]
        assert [part.at_boundary(None, 60.0) for part in parts] == [True, True]


def test_a_thousand_ranks_cost_the_store_a_few_calls_each() -> None:
    calls = 0

    class Counting(dist.Store):
        def __init__(self, store: dist.Store) -> None:
            super().__init__()
            self.store = store

        def __getattribute__(self, name: str) -> Any:
            nonlocal calls
            if name in ("add", "check", "compare_set", "get", "set"):
                calls += 1
                return getattr(self.store, name)
            return super().__getattribute__(name)

    store = Counting(dist.HashStore())
    parts = [Agreement(store, rank, 1000, linger=0.0) for rank in range(1000)]
    calls = 0
    first = [part.at_boundary("SIGTERM", 60.0) for part in parts]
    second = [part.at_boundary("SIGTERM", 60.0) for part in parts]
    assert not any(first)  # one after the other: the first had passed before the last came
    assert all(second)
    assert calls / 1000 < 16


def lockstep(rank: int, world: int, store: str, backend: str, ready: str) -> tuple[int, float]:
    """Train in step with the others until told to suspend: the step, and its mean price."""
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world)
    tensor, step, spent = torch.ones(1000), 0, 0.0
    while True:
        dist.all_reduce(tensor)
        tensor.div_(world)
        step += 1
        start = time.perf_counter()
        told = receive_suspend_command()
        spent += time.perf_counter() - start
        if told:
            break
        if step == 5:
            Path(f"{ready}/{rank}").touch()
    dist.barrier()
    return step, spent / step


def started(make: Callable[[], Ranks], ready: Path, world: int) -> Ranks:
    ranks = make()
    until = time.monotonic() + 30
    while len(list(ready.iterdir())) < world and time.monotonic() < until:
        time.sleep(0.01)
    return ranks


@pytest.mark.parametrize("backend", ["gloo", "hfreduce"])
def test_one_rank_that_hears_it_stops_all_at_the_same_step(backend: str, tmp_path: Path) -> None:
    ranks = started(lambda: Ranks(lockstep, 3, backend, str(tmp_path)), tmp_path, 3)
    os.kill(ranks.pid(1), signal.SIGUSR1)
    ended = ranks.join()
    assert [end.error for end in ended] == [""] * 3, [end.text for end in ended]
    assert len({end.value[0] for end in ended}) == 1
    assert ended[0].value[0] >= 5


@pytest.mark.parametrize("backend", ["gloo", "hfreduce"])
def test_a_storm_of_signals_breaks_no_collective(backend: str, tmp_path: Path) -> None:
    ranks = started(lambda: Ranks(lockstep, 2, backend, str(tmp_path)), tmp_path, 2)
    for _ in range(100):
        for rank in range(2):
            os.kill(ranks.pid(rank), signal.SIGTERM)
    ended = ranks.join()
    assert [end.error for end in ended] == ["", ""], [end.text for end in ended]
    assert len({end.value[0] for end in ended}) == 1


def changing_groups(rank: int, world: int, store: str) -> list[int]:
    """Ask before there is a group, in one, and in another after it: where each was told."""
    told = [1 if receive_suspend_command() else 0]
    for name in ("first", "second"):
        dist.init_process_group(
            "gloo", init_method=f"file://{store}-{name}", rank=rank, world_size=world
        )
        if name == "second" and rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        told.append(0)
        for step in range(1, 100):
            dist.barrier()
            time.sleep(0.005)
            if receive_suspend_command():
                told[-1] = step
                break
        leave()
    return told


def test_a_group_that_is_made_anew_agrees_anew() -> None:
    first, second = run(changing_groups, 2)
    assert first == second
    assert first[:2] == [0, 0]
    assert first[2] > 0
