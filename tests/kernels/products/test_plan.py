"""How products are cut, and which are worth it: arithmetic on sizes."""

from __future__ import annotations

import pytest

from hfai.kernels.products import plan

SIZES = [
    (4000, 985, 3940),
    (4000, 3940, 985),
    (3940, 4000, 985),
    (51200, 1024, 3072),
    (3072, 51200, 1024),
    (512, 320000, 512),
    (100000, 64, 64),
    (64, 10**7, 64),
    (50000, 50000, 50000),
]


@pytest.mark.parametrize(("m", "k", "n"), SIZES)
def test_what_is_taken_apart_at_a_time_fits_into_the_workspace(m: int, k: int, n: int) -> None:
    chosen = plan.choose(m, k, n, 132)
    apart = plan.piece_bytes(chosen.row_chunk, chosen.depth_chunk, plan.ROWS)
    apart += plan.piece_bytes(n, chosen.depth_chunk, plan.COLUMNS)
    assert apart <= plan.workspace(m, k, n)
    assert 0 < chosen.row_chunk <= m
    assert 0 < chosen.depth_chunk <= k
    assert chosen.depth_chunk % plan.DEPTH == 0 or chosen.depth_chunk == k
    assert chosen.row_chunk % plan.ROWS == 0 or chosen.row_chunk == m
    assert chosen.splits >= 1


def test_the_workspace_is_at_most_a_quarter_of_large_matrices() -> None:
    m, k, n = 51200, 1024, 3072
    assert plan.workspace(m, k, n) * 4 <= 4 * (m * k + k * n + m * n)
    assert plan.workspace(1, 1, 1) == plan.LEAST_WORKSPACE


@pytest.mark.parametrize(("m", "k", "n"), SIZES[:6])
def test_large_products_are_worth_it(m: int, k: int, n: int) -> None:
    assert plan.is_worth(m, k, n, 132)


@pytest.mark.parametrize(
    ("m", "k", "n"), [(512, 512, 512), (128, 1024, 4096), (100000, 64, 64), (64, 10**7, 64)]
)
def test_small_and_thin_products_are_not(m: int, k: int, n: int) -> None:
    assert not plan.is_worth(m, k, n, 132)


def test_a_product_of_which_no_part_fits_is_not_worth_it() -> None:
    assert not plan.is_worth(64, 64, 10**6, 132)


def test_few_tiles_share_a_long_sum() -> None:
    assert plan.choose(512, 100_000, 512, 132).splits > 1
    assert plan.choose(51200, 1024, 3072, 132).splits == 1
