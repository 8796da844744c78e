"""Which way gradients of GPUs take follows from what all ranks know of their GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from haiscale.peers import Place, decide

ALL = ["a", "b", "c"]


def place(gpu: str, *reached: str) -> Place:
    return Place("node", gpu, ALL, list(reached), forbidden=False)


def test_gpus_that_reach_no_other_are_for_hfreduce() -> None:
    assert decide([place("a"), place("b"), place("c")]) == ""


def test_one_pair_that_reaches_each_other_is_for_nccl() -> None:
    found = decide([place("a"), place("b", "c"), place("c")])
    assert found == "the GPUs of ranks 1 and 2 reach each other's memory"


def test_a_gpu_of_no_rank_does_not_count() -> None:
    assert decide([place("a", "c"), place("b", "c")]) == ""


def test_what_nccl_is_forbidden_on_all_ranks_does_not_count() -> None:
    places = [place("a", "b"), place("b", "a")]
    assert decide([replace(each, forbidden=True) for each in places]) == ""
    assert decide([replace(places[0], forbidden=True), places[1]]) != ""


def test_ranks_that_see_only_their_own_gpu_leave_it_to_nccl() -> None:
    alone = [replace(place(gpu), seen=[gpu]) for gpu in ("a", "b")]
    assert "do not see each other's GPU" in decide(alone)
    assert decide([place("a"), alone[1]]) == "", "one that sees both knows"


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(place("b"), node="another"), "the ranks are on several machines"),
        (place("a"), "ranks share a GPU"),
    ],
)
def test_several_machines_and_shared_gpus_are_not_for_hfreduce(other: Place, why: str) -> None:
    assert decide([place("a"), other]) == why
