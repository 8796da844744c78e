"""What a replay must write, and what is only noted: on functions in place of graphs."""

import pytest
import torch
from benchmarks.harness.graphs import check_written

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_outputs_written_anew_pass(dtype: torch.dtype) -> None:
    out = torch.empty(4, 5, dtype=dtype)
    assert check_written(lambda: out.normal_(), [out]) == ""


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_element_left_as_it_was_is_an_error(dtype: torch.dtype) -> None:
    whole, out = torch.empty(3, dtype=dtype), torch.empty(4, 5, dtype=dtype)

    def replay() -> None:
        whole.zero_()
        out.view(-1)[:-1].zero_()

    with pytest.raises(RuntimeError, match="left elements of an output unwritten"):
        check_written(replay, [whole, out])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [1, -1])
def test_adding_to_what_lay_there_is_an_error(dtype: torch.dtype, sign: int) -> None:
    out = torch.empty(4, 5, dtype=dtype)
    with pytest.raises(RuntimeError, match="left elements of an output unwritten"):
        check_written(lambda: out.mul_(sign).add_(1), [out])


@pytest.mark.parametrize("dtype", DTYPES)
def test_memory_times_zero_is_noted(dtype: torch.dtype) -> None:
    out = torch.empty(4, 5, dtype=dtype)
    assert "nobody wrote" in check_written(lambda: out.mul_(0).add_(1), [out])


def test_outputs_that_are_nan_whatever_lay_there_are_an_error() -> None:
    out = torch.empty(4)
    with pytest.raises(RuntimeError, match="left elements of an output unwritten"):
        check_written(lambda: out.fill_(float("nan")), [out])
