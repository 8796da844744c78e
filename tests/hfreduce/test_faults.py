"""Ranks that die, come late, stop, fork or call something else: the others learn it, and who.

HFREDUCE_KILL_ROUNDS=200 lengthens the test that kills ranks at random points (pytest --timeout=0).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import random
import re
import resource
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

import hfreduce
from hfreduce import _engine, exchange, segment
from tests.hfreduce.ranks import Ranks, leftovers, reducer, run

KILL_ROUNDS = int(os.environ.get("HFREDUCE_KILL_ROUNDS", "5"))
TIMEOUT = 3.0


def for_ever(rank: int, world: int, store: str, seed: int, port: int) -> None:
    """Call collectives of all kinds and sizes, some asynchronous, until something breaks."""
    shared = dist.TCPStore("127.0.0.1", port)
    threads = 1 + seed % 2
    group = hfreduce.Reducer(
        shared, rank, world, timeout=TIMEOUT, threads=threads, chunk_bytes=64 << 10
    )
    draw = random.Random(seed)  # the same on all ranks
    while True:
        size = draw.choice([0, 10, 3000, 100_000, 1_000_000])
        root, kind = draw.randrange(world), draw.randrange(6)
        tensor = torch.ones(size)
        if kind == 0:
            group.all_reduce(tensor)
        elif kind == 1:
            group.broadcast(tensor, root)
        elif kind == 2:
            group.all_gather(torch.empty(size * world), tensor)
        elif kind == 3:
            group.reduce_scatter(tensor, torch.ones(size * world))
        elif kind == 4:
            group.reduce(tensor, root)
        else:
            handles = [group.all_reduce(torch.ones(size), async_op=True) for _ in range(3)]
            for handle in handles:
                assert handle is not None
                handle.wait()


def test_when_a_rank_is_killed_at_any_point_all_others_name_it_in_time() -> None:
    draw = random.Random(int(time.time()))
    for turn in range(KILL_ROUNDS):
        world = draw.choice([2, 3, 4])
        victim, delay = draw.randrange(world), draw.random() * 1.2
        # Not torch's FileStore: one killed in the middle of a write has all others read for ever.
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        ranks = Ranks(for_ever, world, draw.randrange(1000), store.port)
        time.sleep(delay)
        ranks.kill(victim)
        killed = time.monotonic()
        ended = ranks.join(TIMEOUT + 20)
        took = time.monotonic() - killed
        where = f"turn {turn}: {world} ranks, rank {victim} killed after {delay:.3f} s"
        for rank, end in enumerate(ended):
            if rank == victim:
                assert end.code == -signal.SIGKILL, where
            else:
                # Late: it died before it had joined the group.
                assert end.error in ("DeadPeerError", "LatePeerError"), f"{where}\n{end.text}"
                assert f"rank {victim}" in end.text.splitlines()[-1], f"{where}\n{end.text}"
        assert took < TIMEOUT + 3, where
        assert leftovers() == [], where


def one_is_late(rank: int, world: int, store: str) -> float:
    group = reducer(rank, world, store, timeout=0.6)
    group.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(2)
    words = "others waited 0.6 s" if rank == 1 else r"rank 1 \(pid"
    with pytest.raises(hfreduce.LatePeerError, match=words) as caught:
        group.all_reduce(torch.ones(100_000))
    assert caught.value.rank == 1
    assert isinstance(caught.value, TimeoutError)
    return time.monotonic() - start


def test_a_late_rank_is_named_by_all_within_the_timeout() -> None:
    took = run(one_is_late, 3)
    assert 0.5 < took[0] < 1.8
    assert 0.5 < took[2] < 1.8


def one_is_stopped(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store, timeout=0.6)
    group.barrier()
    if rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    group.barrier()


def test_a_stopped_process_counts_as_late() -> None:
    ranks = Ranks(one_is_stopped, 2)
    time.sleep(2.0)
    os.kill(ranks.pid(0), signal.SIGCONT)
    ended = ranks.join()
    assert [end.error for end in ended] == ["LatePeerError", "LatePeerError"]
    assert "rank 0 (pid" in ended[1].text
    assert "this rank 0 (pid" in ended[0].text


def one_never_comes(rank: int, world: int, store: str) -> None:
    if rank == 1:
        return
    reducer(rank, world, store, timeout=0.6)


def test_a_rank_that_never_comes_is_named() -> None:
    ended = Ranks(one_never_comes, 2).join()
    assert ended[0].error == "LatePeerError"
    assert "rank 1 did not come to make the group 'group' within 0.6 s" in ended[0].text


def closes_with_two_under_way(rank: int, world: int, store: str, chunks: int) -> float | None:
    shared = dist.FileStore(store, world)
    count = 8 if chunks == 1 else chunks * (64 << 10) // 4
    group = reducer(rank, world, store, timeout=10, threads=1, chunk_bytes=64 << 10)
    if rank == 0:
        kept = [torch.full((count,), value) for value in (1.0, 100.0)]
        handles = [group.all_reduce(tensor, async_op=True) for tensor in kept]
        time.sleep(0.2)
        group.close()
        for handle in handles:
            assert handle is not None
            with pytest.raises(RuntimeError, match="this Reducer is closed"):
                handle.wait()
        shared.set("closed", "1")
        return None
    shared.wait(["closed"])
    tensor = torch.full((count,), 10.0)
    try:
        group.all_reduce(tensor)
    except hfreduce.DeadPeerError:
        return None
    assert tensor.unique().numel() == 1
    return float(tensor[0])


@pytest.mark.parametrize("chunks", [1, 8])
def test_a_call_behind_one_that_closing_ended_writes_nothing(chunks: int) -> None:
    assert run(closes_with_two_under_way, 2, chunks)[1] in (11.0, None)


def waits_for_another(rank: int, world: int, store: str) -> float:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    if rank == 2:
        os._exit(0)
    time.sleep(1.5 * rank)
    start = time.monotonic()
    with pytest.raises(hfreduce.DeadPeerError) as caught:
        group.all_reduce(torch.ones(8))
    assert caught.value.rank == 2
    return time.monotonic() - start


def test_a_dead_rank_is_named_at_once_though_another_is_waited_for() -> None:
    ended = Ranks(waits_for_another, 3).join()
    assert ended[0].value < 1.0, ended[0].text
    assert ended[1].value < 1.0, ended[1].text


def one_cannot_map(rank: int, world: int, store: str, instructions: bool) -> None:
    if rank == 1 and instructions:
        os.environ["HFREDUCE_INSTRUCTIONS"] = "none"
    elif rank == 1:
        mapped = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (60 << 20),) * 2)
    reducer(rank, world, store, timeout=20, chunk_bytes=16 << 20)


@pytest.mark.parametrize("instructions", [False, True])
def test_a_rank_that_cannot_map_the_memory_tells_all_why(instructions: bool) -> None:
    why = "this processor does not run none" if instructions else "Cannot allocate memory"
    for end in Ranks(one_cannot_map, 2, instructions).join():
        assert end.error == "ConnectionError"
        assert "rank 1 could not open the group's memory" in end.text
        assert why in end.text
        assert end.seconds < 10


def test_what_the_system_refuses_is_an_oserror_with_its_number() -> None:
    with pytest.raises(FileNotFoundError):
        _engine.Group.open(bytes(16), os.getpid(), 999_999, 0, 2, 1, 4, 65536, 1024, "", 0, 0)


def comes_late_to_a_store(rank: int, world: int, store: str, port: int) -> None:
    shared = dist.TCPStore("127.0.0.1", port, world, rank == 0)
    if rank == 1:
        time.sleep(1.0)
    hfreduce.Reducer(shared, rank, world, timeout=20).barrier()


def test_waiting_for_a_rank_writes_nothing_to_stderr(capfd: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("spawn")  # its stderr is this test's
    arguments = [(rank, 2, "", port) for rank in range(2)]
    ranks = [context.Process(target=comes_late_to_a_store, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(60)
    assert [process.exitcode for process in ranks] == [0, 0]
    assert "[c10d]" not in capfd.readouterr().err


def no_threads(rank: int, world: int, store: str) -> str:
    group = reducer(rank, world, store, timeout=20, threads=3)
    group.barrier()
    tensor, before = torch.ones(1 << 20), resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_AS, (1 << 20, before[1]))  # nothing for threads' stacks
    try:
        group.all_reduce(tensor)
    except (OSError, hfreduce.PeerError) as error:
        resource.setrlimit(resource.RLIMIT_AS, before)
        return f"{type(error).__name__}: {error}"
    return ""


def test_a_rank_that_gets_no_threads_raises_and_tells_all() -> None:
    first, second = run(no_threads, 2)
    assert second.startswith("BlockingIOError"), second
    assert "rank 1" in first
    assert "was interrupted" in first


def one_raises(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    if rank == 1:
        raise ZeroDivisionError
    group.all_reduce(torch.ones(10))


def one_leaves(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    if rank == 1:
        group.close()
        time.sleep(1.5)
        return
    group.all_reduce(torch.ones(10))


def test_a_rank_that_ends_by_an_exception_is_named_at_once() -> None:
    ended = Ranks(one_raises, 3).join()
    assert [end.error for end in ended] == ["DeadPeerError", "ZeroDivisionError", "DeadPeerError"]
    assert "rank 1 (pid" in ended[0].text
    assert ended[0].seconds < 5


def test_a_rank_that_leaves_is_named_at_once() -> None:
    ended = Ranks(one_leaves, 3).join()
    assert [end.error for end in ended] == ["DeadPeerError", "", "DeadPeerError"]
    assert "has left the group while others wait for it" in ended[2].text
    assert ended[0].seconds < 5


def ends_early(rank: int, world: int, store: str) -> float:
    group = reducer(rank, world, store)
    tensor = torch.ones(30_000)
    group.all_reduce(tensor)
    if rank == 2:
        time.sleep(0.1)
    group.broadcast(tensor, 0)  # rank 0 is gone before rank 2 comes
    return float(tensor[0])


def test_who_has_done_its_part_may_go() -> None:
    for _ in range(3):
        assert run(ends_early, 3) == [3.0] * 3


def different_calls(rank: int, world: int, store: str) -> None:
    group = reducer(rank, world, store)
    if rank == 0:
        group.all_reduce(torch.ones(1000), "max")
    else:
        group.broadcast(torch.ones(7), 1)


def different_sizes(rank: int, world: int, store: str) -> None:
    reducer(rank, world, store).all_reduce(torch.ones(1000 + 1000 * rank))


def test_ranks_that_call_different_things_are_told_what() -> None:
    ended = Ranks(different_calls, 2).join()
    assert ended[0].error == "MismatchError"
    assert "called broadcast of 28 bytes, root 1 instead" in ended[0].text
    ended = Ranks(different_sizes, 2).join()
    assert {end.error for end in ended} == {"MismatchError"}
    said = " ".join(end.text for end in ended)
    assert "called all_reduce (sum) of 2000 float32" in said or "of 1000 float32" in said


def interrupted(rank: int, world: int, store: str) -> float:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    start = time.monotonic()
    if rank == 1:
        time.sleep(1.0)
    if rank == 0:
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
    expected = KeyboardInterrupt if rank == 0 else hfreduce.PeerError
    with pytest.raises(expected) as caught:
        group.all_reduce(torch.ones(100))
    assert rank == 0 or "rank 0 (pid" in str(caught.value)
    assert rank == 0 or "was interrupted" in str(caught.value)
    return time.monotonic() - start


def test_a_signal_interrupts_a_wait() -> None:
    took = run(interrupted, 2)
    assert took[0] < 0.9


def interrupted_while_waiting(rank: int, world: int, store: str, call: bool) -> None:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    if rank == 1:
        time.sleep(0.6)
        with pytest.raises(hfreduce.PeerError, match=r"rank 0 \(pid \d+\) was interrupted"):
            group.all_reduce(torch.ones(8))
        return
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    handle = group.all_reduce(torch.ones(8), async_op=True)
    assert handle is not None
    with pytest.raises(KeyboardInterrupt):
        group.barrier() if call else handle.wait()
    time.sleep(0.6)  # the call itself was ended: nothing is written later
    assert isinstance(handle.exception(), hfreduce.PeerError)


@pytest.mark.parametrize("call", [False, True])
def test_ctrl_c_in_a_wait_for_an_asynchronous_call_is_told_to_all(call: bool) -> None:
    run(interrupted_while_waiting, 2, call)


def forks(rank: int, world: int, store: str) -> str:
    group = reducer(rank, world, store, timeout=20)
    group.all_reduce(torch.ones(10), async_op=True)
    said = ""
    for _ in range(2):
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                group.all_reduce(torch.ones(10))
            except RuntimeError as error:
                os.write(writing, str(error).encode())
            del group
            if said:  # once with and once without the handlers of exit
                atexit._run_exitfuncs()
            os._exit(0)
        os.close(writing)
        said = os.fdopen(reading).read()
        os.waitpid(child, 0)
        tensor = torch.ones(100_000)
        group.all_reduce(tensor)
        assert tensor[5] == world
    return said


def test_a_forked_child_is_refused_and_harms_nobody() -> None:
    for said in run(forks, 2):
        assert "belongs to process" in said
        assert "make a new one here, or start processes with the method 'spawn'" in said


def apart(rank: int, world: int, store: str) -> str:
    shared = dist.FileStore(store, world)
    everyone = hfreduce.Reducer(shared, rank, world, timeout=20)
    pair = hfreduce.Reducer(shared, rank % 2, 2, timeout=20, name=f"pair {rank // 2}")
    everyone.barrier()
    if rank == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(hfreduce.DeadPeerError) as caught:
        everyone.barrier()
    assert caught.value.rank == 3  # the group of all knows it by this number
    if rank < 2:
        for _ in range(100):
            tensor = torch.ones(1000)
            pair.all_reduce(tensor)
            assert tensor[0] == 2
        return "well"
    try:
        pair.barrier()
    except hfreduce.DeadPeerError as error:
        return f"rank {error.rank}"
    return "nothing"


def test_groups_without_the_dead_rank_go_on() -> None:
    ended = Ranks(apart, 4).join()
    assert [end.value for end in ended] == ["well", "well", "rank 1", None], ended


def patient(rank: int, world: int, store: str) -> tuple[float, float]:
    group = reducer(rank, world, store)
    group.barrier()
    if rank == 1:
        time.sleep(3.0)
    start, cpu = time.monotonic(), time.process_time()
    group.all_reduce(torch.ones(100_000))
    return time.monotonic() - start, time.process_time() - cpu


def test_waiting_takes_under_2_percent_of_a_processor() -> None:
    waited, cpu = run(patient, 2)[0]
    assert waited > 2.5
    assert cpu / waited < 0.02


def fails_asynchronously(rank: int, world: int, store: str) -> str:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    if rank == 1:
        os._exit(3)
    handles = [group.all_reduce(torch.ones(1000), async_op=True) for _ in range(3)]
    for handle in handles:
        assert handle is not None
        with pytest.raises(hfreduce.DeadPeerError, match="rank 1"):
            handle.wait()
    with pytest.raises(RuntimeError, match="DeadPeerError: all_reduce: rank 1"):
        handles[0].torch_future(None).wait()  # type: ignore[union-attr]
    return "named"


def test_handles_raise_what_happened() -> None:
    assert Ranks(fails_asynchronously, 2).join()[0].value == "named"


def test_a_process_that_is_gone_has_no_start_time() -> None:
    child = subprocess.Popen(["sleep", "60"])
    assert _engine.start_time(child.pid) > 0
    assert _engine.start_time(child.pid) == int(
        Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[19]
    )
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert _engine.start_time(child.pid) == -1, "a zombie does not live"
    child.wait()
    assert _engine.start_time(child.pid) == -1


def test_a_process_with_another_one_s_number_counts_as_dead(tmp_path: Path) -> None:
    """What is seen when a dead rank's number has been given to a new process."""
    group = _engine.Group.create(bytes(16), 0, 2, 1, 4, 65536, 1024, "", 0, 0)
    me = os.getpid()
    start = _engine.start_time(me)
    assert group.join([me, me], [start, start - 1], 20.0)[:2] == (1, 1)


def dies_in_the_making(
    rank: int, world: int, store: str, victim: int, turn: int, said: bool
) -> None:
    shared = dist.FileStore(store, world)
    if rank != victim:
        hfreduce.Reducer(shared, rank, world, timeout=20.0)
        return
    meeting = exchange.through_store(shared, rank, world, "group", 20.0)
    turns = 0

    def up_to(text: str, watch: exchange.Watch | None) -> list[str]:
        nonlocal turns
        if turns == turn:
            if said:
                shared.set(f"hfreduce/group/1/{turn}/{rank}", text)
            os.kill(os.getpid(), signal.SIGKILL)
        turns += 1
        return meeting(text, watch)

    members = segment.meet(up_to, f"rank {rank}")
    segment.connect(up_to, rank, members, segment.Settings(), 20.0)


# What ranks say to each other: 0 who they are, 1 where the memory is, 2 that they have it.
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    ("turn", "said"), [(0, True), (1, False), (1, True), (2, False), (2, True)]
)
def test_a_rank_that_dies_while_the_group_is_made_is_named_at_once(
    victim: int, turn: int, said: bool
) -> None:
    ended = Ranks(dies_in_the_making, 3, victim, turn, said).join()
    assert ended[victim].code == -signal.SIGKILL
    for end in (end for rank, end in enumerate(ended) if rank != victim):
        assert end.error == "DeadPeerError", end.text
        assert f"rank {victim}" in end.text.splitlines()[-1]
        assert end.seconds < 5


def the_maker_dies_before_all_have_opened(rank: int, world: int, store: str) -> None:
    shared = dist.FileStore(store, world)
    if rank != 1:
        hfreduce.Reducer(shared, rank, world, timeout=20.0)
        return
    meeting = exchange.through_store(shared, rank, world, "group", 20.0)
    members = segment.meet(meeting, "rank 1")
    offers = 0

    def slowly(text: str, watch: exchange.Watch | None) -> list[str]:
        nonlocal offers
        texts = meeting(text, watch)
        offers += 1
        if offers == 1:  # rank 0 has offered its memory: the next it says is that it has it
            shared.wait(["hfreduce/group/1/2/0"])
            os.kill(members[0].pid, signal.SIGKILL)
            while _engine.start_time(members[0].pid) == members[0].start:
                time.sleep(0.001)
        return texts

    segment.connect(slowly, rank, members, segment.Settings(), 20.0)


def test_when_the_rank_with_the_memory_dies_before_others_have_opened_it_all_name_it() -> None:
    """Found by the campaign: one of 500 rounds, a ConnectionError that named who could not open."""
    ended = Ranks(the_maker_dies_before_all_have_opened, 3).join()
    for rank in (1, 2):
        assert ended[rank].error == "DeadPeerError", ended[rank].text
        assert "rank 0 died before all had opened the group's memory" in ended[rank].text
        assert ended[rank].seconds < 5


def store_goes(rank: int, world: int, store: str, known: bool) -> None:
    files = dist.FileStore(store, world)
    if rank == 0:
        shared = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        files.set("port", str(shared.port))
        if known:
            segment.meet(exchange.through_store(shared, rank, world, "group", 20.0), "rank 0")
        files.wait(["others"])
        time.sleep(0.3)  # they wait for this rank's next text
        os.kill(os.getpid(), signal.SIGKILL)
    shared = dist.TCPStore("127.0.0.1", int(files.get("port")))
    if files.add("came", 1) == world - 1:
        files.set("others", "1")
    hfreduce.Reducer(shared, rank, world, timeout=20.0)


@pytest.mark.parametrize("known", [False, True])
def test_when_the_rank_that_serves_the_store_dies_the_others_hear_at_once(known: bool) -> None:
    for end in Ranks(store_goes, 3, known).join()[1:]:
        assert end.error == ("DeadPeerError" if known else "ConnectionError"), end.text
        # The other may have gone by then for the same reason.
        words = r"rank 0 (and rank \d )?died while" if known else r"mostly rank 0 \("
        assert re.search(words, end.text.splitlines()[-1]), end.text
        assert end.seconds < 5


def closed_by_a_handler(rank: int, world: int, store: str) -> str:
    group = reducer(rank, world, store, timeout=20)
    group.barrier()
    if rank == 1:
        time.sleep(1.0)
        return ""
    said = []

    def handler(*_: object) -> None:
        try:
            group.barrier()
        except RuntimeError as error:
            said.append(str(error))
        group.close()

    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    with pytest.raises(RuntimeError, match="this Reducer is closed"):
        group.all_reduce(torch.ones(100))
    with pytest.raises(RuntimeError, match="this Reducer is closed"):
        group.barrier()
    return said[0]


def test_a_signals_handler_may_close_the_group_but_not_call_within_a_call() -> None:
    said = run(closed_by_a_handler, 2)[0]
    assert "a signal's handler cannot call a collective within another" in said
