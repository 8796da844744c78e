"""The computed order: a permutation for every n, different for every key, without a bias."""

from __future__ import annotations

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ffrecord.torch.permutation import Permutation

_KEYS = st.integers(-(2**63), 2**63 - 1)


@given(st.integers(1, 3000), _KEYS, _KEYS)
@settings(max_examples=150, deadline=None)
def test_every_number_comes_once(n: int, seed: int, epoch: int) -> None:
    order = Permutation(n, seed, epoch)(np.arange(n))
    assert np.array_equal(np.sort(order), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 64, 65, 127, 7919, 104729, 2**17])
def test_every_number_comes_once_for_one_primes_and_powers(n: int) -> None:
    assert np.array_equal(np.sort(Permutation(n, 5)(np.arange(n))), np.arange(n))


@pytest.mark.parametrize("n", [10**9, 2**62 - 1])
def test_samples_of_a_huge_set_are_in_range_and_never_meet(n: int) -> None:
    positions = np.arange(200_000) * (n // 200_000)
    found = Permutation(n, 1)(positions)
    assert found.min() >= 0
    assert found.max() < n
    assert len(np.unique(found)) == len(positions)


def test_a_position_has_the_same_number_whatever_is_asked_with_it() -> None:
    order = Permutation(1000, 3)
    whole = order(np.arange(1000))
    assert [int(order(np.array([i]))[0]) for i in range(0, 1000, 37)] == whole[::37].tolist()


def test_the_order_stays_as_it_is_between_versions() -> None:
    assert Permutation(10, 0, 0)(np.arange(10)).tolist() == [4, 1, 6, 7, 0, 9, 8, 5, 3, 2]


def test_all_orders_of_three_and_of_four_are_about_as_frequent() -> None:
    for n in (3, 4):
        orders = list(itertools.permutations(range(n)))
        rounds = 200 * len(orders)
        seen = collections.Counter(
            tuple(Permutation(n, 0, epoch)(np.arange(n)).tolist()) for epoch in range(rounds)
        )
        chi_square = sum((seen[order] - 200) ** 2 / 200 for order in orders)
        # The 99.99 % point of chi-square with 5 and 23 degrees of freedom.
        assert chi_square < {3: 25.7, 4: 56.5}[n]


def test_epochs_and_neighbours_are_unrelated() -> None:
    n = 100_003
    first, second = (Permutation(n, 7, epoch)(np.arange(n)) for epoch in (0, 1))
    # Five standard deviations of a correlation of unrelated numbers.
    most = 5 / n**0.5
    assert abs(np.corrcoef(first, np.arange(n))[0, 1]) < most
    assert abs(np.corrcoef(first, second)[0, 1]) < most
    assert abs(np.corrcoef(first[1:], first[:-1])[0, 1]) < most


@pytest.mark.parametrize("n", [0, -1, 2**62])
def test_a_size_that_is_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(ValueError, match=r"give 1 to 2\*\*62"):
        Permutation(n, 0)
