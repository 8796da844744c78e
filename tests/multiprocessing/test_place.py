"""Which process this is, under both meanings of WORLD_SIZE."""

from __future__ import annotations

import pytest

from hfai.multiprocessing import place

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "1234",
}


def test_torchruns_numbers_count_processes() -> None:
    found = place(environ=TORCHRUN)
    assert (found.rank, found.world_size, found.local_rank, found.node) == (5, 8, 1, 1)
    assert found.init_method == "tcp://10.0.0.1:1234"
    assert str(found) == (
        "rank 5 of 8: process 1 of 4 on machine 1 of 2, meeting at 10.0.0.1:1234 "
        "(WORLD_SIZE and RANK count processes, as torchrun sets them)"
    )


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_IP"])
def test_a_schedulers_numbers_count_machines(name: str) -> None:
    env = {"RANK": "1", "WORLD_SIZE": "2", name: "fd00::1", "MASTER_PORT": "2222"}
    found = place(3, 8, env)
    assert (found.rank, found.world_size, found.node, found.nodes) == (11, 16, 1, 2)
    assert found.init_method == "tcp://[fd00::1]:2222"
    assert "WORLD_SIZE and RANK count machines" in str(found)


def test_without_numbers_this_machine_is_all() -> None:
    found = place(1, 2, {})
    assert (found.rank, found.world_size, found.address) == (1, 2, "127.0.0.1")
    assert "no WORLD_SIZE: this machine is all" in str(found)


@pytest.mark.parametrize(
    ("arguments", "env", "words"),
    [
        ((), {}, "LOCAL_RANK and LOCAL_WORLD_SIZE are not set: start with torchrun"),
        ((2, 2), {}, "local_rank=2 is not in 0 … 1"),
        ((0, 2), {"WORLD_SIZE": "2", "RANK": "2"}, "RANK=2 is not in 0 … 1"),
        ((0, 2), {"WORLD_SIZE": "2", "RANK": "1"}, "neither MASTER_ADDR nor MASTER_IP"),
        ((0, 2), {"WORLD_SIZE": "two"}, "WORLD_SIZE='two' is not a whole number"),
        ((0, 4), TORCHRUN, "local_rank=0, but torchrun started this process as LOCAL_RANK=1"),
        ((1, 8), TORCHRUN, "nprocs=8, but torchrun"),
        ((), {**TORCHRUN, "RANK": "9"}, "contradict each other"),
        ((), {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}, "but RANK is not"),
    ],
)
def test_what_contradicts_itself_is_named(
    arguments: tuple[int, ...], env: dict[str, str], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        place(*arguments, environ=env)
