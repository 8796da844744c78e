from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hfai.kernels.layer_norm import plan
from tests.kernels.compiled import DEVICES

LENGTHS = st.one_of(st.integers(1, 300_000), st.integers(1, 300).map(lambda n: 1024 * n))
BYTES = st.sampled_from([(2, 2), (4, 4), (2, 4)])
DEVICE = st.sampled_from(list(DEVICES.values()))


@given(LENGTHS, BYTES)
def test_vectors_divide_the_row_and_take_at_most_16_bytes(
    length: int, sizes: tuple[int, int]
) -> None:
    vector = plan.vector_length(length, *sizes)
    assert length % vector == 0
    assert vector * max(sizes) <= 16


@given(LENGTHS, BYTES, DEVICE)
def test_forward_threads_hold_the_whole_row_and_no_more_than_registers_take(
    length: int, sizes: tuple[int, int], limits: plan.DeviceLimits
) -> None:
    layout = plan.forward_plan(length, *sizes, limits)
    if layout is None:
        assert length > 32768
        return
    per_lane = -(-length // (layout.vector * layout.lanes * layout.cluster))
    assert per_lane * layout.vector <= 64
    assert layout.threads <= 1024
    assert layout.threads % layout.lanes == 0
    assert layout.cluster <= limits.max_cluster
    assert layout.groups == 1


@given(LENGTHS, BYTES, DEVICE)
def test_a_row_s_sums_have_one_order_whether_rows_are_few_or_many(
    length: int, sizes: tuple[int, int], limits: plan.DeviceLimits
) -> None:
    many = plan.forward_plan(length, *sizes, limits)
    few = plan.forward_plan(length, *sizes, limits, few_rows=True)
    assert (many is None) == (few is None)
    if many is None or few is None:
        return
    assert (few.vector, few.lanes, few.cluster) == (many.vector, many.lanes, many.cluster)
    assert few.threads % few.lanes == 0
    assert few.threads % 32 == 0
    assert few.lanes * few.groups <= few.threads <= 1024
    # Threads hold whole branches of a lane's tree, so they are a power of two and none is too many.
    per_lane = -(-length // (few.vector * few.lanes * few.cluster))
    assert few.groups in (1, 2, 4, 8, 16, 32)
    assert few.groups < 2 * per_lane
    if few.groups > 1:
        assert few.cluster == 1
    else:  # RowSum: a block has 16 barriers, of which slots of more than a warp take one each
        assert few.lanes <= 32 or few.threads // few.lanes < 16


@given(LENGTHS, BYTES, DEVICE, st.sampled_from([0, 2, 4]), st.booleans())
def test_backward_fits_the_block_and_its_shared_memory(
    length: int,
    sizes: tuple[int, int],
    limits: plan.DeviceLimits,
    weight_bytes: int,
    few_rows: bool,
) -> None:
    layout = plan.backward_plan(length, *sizes, weight_bytes, limits, True, few_rows)
    if layout is None:
        assert length > 4096, "only long rows may be left to long_rows.cu"
        return
    assert layout.columns(length) <= 32 + layout.vector
    assert layout.threads <= 1024
    assert layout.cluster <= limits.max_cluster
    shared = layout.shared_bytes(length, *sizes, weight_bytes)
    assert shared <= limits.shared_bytes_per_block
    # RowSum: a block has 16 barriers, of which slots of more than a warp take one each.
    assert layout.lanes <= 32 or layout.threads // layout.lanes < 16


@given(LENGTHS, BYTES, DEVICE, st.sampled_from([0, 2, 4]))
def test_which_thread_holds_what_depends_on_neither_alignment_nor_the_number_of_rows(
    length: int, sizes: tuple[int, int], limits: plan.DeviceLimits, weight_bytes: int
) -> None:
    layouts = [
        plan.backward_plan(length, *sizes, weight_bytes, limits, aligned, few_rows)
        for aligned in (True, False)
        for few_rows in (True, False)
    ]
    held = {None if p is None else (p.vector, p.lanes, p.cluster) for p in layouts}
    assert len(held) == 1, "the bits of dx would depend on it"


@pytest.mark.parametrize("length", [40, 768, 1024, 4096, 8192])
def test_usual_rows_stay_on_the_chip_of_every_device(length: int) -> None:
    for limits in DEVICES.values():
        for size in (2, 4):
            assert plan.forward_plan(length, size, size, limits) is not None
            assert plan.backward_plan(length, size, size, size, limits) is not None
