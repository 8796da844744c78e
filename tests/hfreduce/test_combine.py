"""The arithmetic of the engine, against torch's own conversions and sums in float32 or wider."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hfreduce import _engine
from hfreduce.dtypes import DTYPES, OPS

SETS = _engine.instruction_sets()
FLOATS = [dtype for dtype in DTYPES if dtype.is_floating_point]
INTEGERS = [dtype for dtype in DTYPES if not dtype.is_floating_point]
NARROW = [torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def combine(sets: str, op: str, parts: list[Tensor]) -> tuple[Tensor, Tensor]:
    out, copy = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    pointers = [part.data_ptr() for part in parts]
    _engine.combine(
        sets, DTYPES[out.dtype], OPS[op], pointers, out.data_ptr(), copy.data_ptr(), out.numel()
    )
    return out, copy


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(BITS[tensor.element_size()])


def same(a: Tensor, b: Tensor) -> bool:
    """Say whether bits are equal, or both are NaN."""
    nan = a.double().isnan() & b.double().isnan()
    return bool(((bits(a) == bits(b)) | nan).all())


def reference(op: str, parts: list[Tensor]) -> Tensor:
    wide = torch.float64 if parts[0].dtype == torch.float64 else torch.float32
    rows = [part.to(wide) for part in parts]
    total = rows[0]
    for row in rows[1:]:
        if op in ("sum", "avg"):
            total = total + row
        else:
            total = torch.minimum(total, row) if op == "min" else torch.maximum(total, row)
    total = total / len(parts) if op == "avg" else total
    if parts[0].dtype == torch.float8_e4m3fn:
        total = total.clamp(-448, 448)  # as torch itself does from 2.13 on
    return total.to(parts[0].dtype)


def every_value(dtype: torch.dtype) -> Tensor:
    """Return every value that a narrow type has, NaNs and infinities too."""
    if dtype.itemsize == 1:
        return torch.arange(256, dtype=torch.int32).to(torch.uint8).view(dtype)
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("dtype", NARROW, ids=name)
def test_every_value_of_a_narrow_type_passes_unchanged(sets: str, dtype: torch.dtype) -> None:
    values = every_value(dtype)
    for result in combine(sets, "sum", [values]):
        assert same(result, values)


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", NARROW, ids=name)
def test_pairs_of_all_values_are_as_torch_converts_them(
    sets: str, op: str, dtype: torch.dtype
) -> None:
    values = every_value(dtype)
    shifts = range(256) if dtype.itemsize == 1 else (1, 999, 2**14 + 1, 2**15, 50_001)
    for shift in shifts:
        parts = [values, values.view(BITS[dtype.itemsize]).roll(shift).view(dtype)]
        result, copy = combine(sets, op, parts)
        assert same(result, reference(op, parts)), shift
        assert same(result, copy)


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("dtype", FLOATS, ids=name)
def test_floats_are_combined_in_the_order_of_ranks_and_rounded_once(
    sets: str, op: str, ranks: int, dtype: torch.dtype
) -> None:
    # 1000 + 13: whole vectors and a rest.
    parts = [(torch.randn(1013) * 3**rank).to(dtype) for rank in range(ranks)]
    result, copy = combine(sets, op, parts)
    assert same(result, reference(op, parts))
    assert same(result, copy)


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("op", ["sum", "min", "max"])
@pytest.mark.parametrize("dtype", INTEGERS, ids=name)
def test_integers_wrap_around_as_torchs_do(sets: str, op: str, dtype: torch.dtype) -> None:
    limits = torch.iinfo(dtype)
    parts = [torch.randint(limits.min, limits.max, (333,), dtype=dtype) for _ in range(3)]
    expected = parts[0].clone()
    for part in parts[1:]:
        if op == "sum":
            expected += part
        else:
            expected = (
                torch.minimum(expected, part) if op == "min" else torch.maximum(expected, part)
            )
    assert torch.equal(combine(sets, op, parts)[0], expected)


@pytest.mark.parametrize("sets", SETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=name)
def test_nothing_is_written_beyond_the_end(sets: str, dtype: torch.dtype) -> None:
    for count in (0, 1, 15, 16, 17, 31):
        source = torch.ones(count + 40).to(dtype)
        out = torch.zeros(count + 40).to(dtype)
        pointer = out[20:].data_ptr()
        _engine.combine(sets, DTYPES[dtype], 0, [source.data_ptr()] * 2, pointer, 0, count)
        inside = torch.zeros(count + 40, dtype=torch.bool)
        inside[20 : 20 + count] = True
        assert torch.equal(out.double() == 2, inside)


@pytest.mark.parametrize("sets", SETS)
def test_a_result_may_lie_where_a_source_lies(sets: str) -> None:
    parts = [torch.randn(5000) for _ in range(3)]
    expected = reference("sum", parts)
    _engine.combine(sets, 0, 0, [part.data_ptr() for part in parts], parts[1].data_ptr(), 0, 5000)
    assert torch.equal(parts[1], expected)


def test_sources_need_no_alignment() -> None:
    raw = [torch.randint(0, 255, (4001,), dtype=torch.uint8) for _ in range(2)]
    parts = [tensor[1:].clone().view(torch.float32).nan_to_num(1.0) for tensor in raw]
    out = torch.empty(1000)
    shifted = [torch.empty(4001, dtype=torch.uint8) for _ in range(2)]
    for target, part in zip(shifted, parts, strict=True):
        target[1:] = part.view(torch.uint8)
    _engine.combine("", 0, 0, [s.data_ptr() + 1 for s in shifted], out.data_ptr(), 0, 1000)
    assert same(out, reference("sum", parts))


def test_what_has_no_meaning_is_refused() -> None:
    for arguments in (("", 6, 1), ("", 99, 0), ("", 0, 4), ("sse9", 0, 0)):
        with pytest.raises(ValueError, match=r"no meaning|no such|does not run"):
            _engine.combine(*arguments, [0], 0, 0, 0)
