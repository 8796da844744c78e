"""Matrix products around the recurrence, in the precision that torch's switch for recurrence asks.

`torch.mm` follows the switch for matrix products, not the one for recurrence, and a switch is the
whole process's: it must not be turned for a moment, since other threads compute too. cuBLAS itself
takes the precision with each call, so fp32 products go to it directly, with torch's own handle,
stream and workspace. Where the library can't be called, `torch.mm` has the product. Large products
in fp32's own precision are made in parts on tensor cores, where those are Hopper's.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from hfai.kernels import jit, products
from hfai.kernels.products.call import why_not_size

# Of cublas_api.h and library_types.h.
_NO_TRANSPOSE, _TRANSPOSE = 0, 1
_CUDA_R_32F = 0
_COMPUTE_32F_PEDANTIC, _COMPUTE_32F_FAST_TF32 = 69, 77
_DEFAULT_ALGORITHM = -1

# cuBLAS loads and stores element by element where a row does not start on 16 bytes or a dimension
# is no multiple of a vector: on an H200, 4000x985 times 985x3940 in TF32 took 0.37 ms that way. A
# copy is worth it where the product does many operations on each element.
_PADDED_TO = 8  # elements
_WORTH_PADDING = 1 << 18
# A sum in one chain of fp32 additions has an error that grows with the root of its length: some
# 2.5e-8 sqrt(k / 2) of it. In fp32's own precision products are therefore made in stretches of the
# summed dimension, each in sums of its own that are then added to what there is: over 1000 steps of
# LSTM 985 that costs a twentieth of the time, and the biases' gradients, which torch sums by other
# means, would else have nearly three times its error.
SUMMED_AT_ONCE = 256
_PAD_THREADS = _SUM_THREADS = 256


def product(a: Tensor, b: Tensor, out: Tensor, tf32: bool) -> None:
    """Compute a [m, k] times b [k, n] into out [m, n].

    Args:
        a: a matrix, one of whose dimensions is contiguous.
        b: likewise.
        out: a matrix whose rows are contiguous; it may be part of a wider one.
        tf32: whether fp32 operands may be rounded to TF32.
    """
    if not tf32 and out.is_cuda and products.why_not(a, b, out) is None:
        products.multiply(a, b, out)
        return
    if out.dtype is torch.float32 and out.is_cuda and 0 not in (*a.shape, *b.shape):
        gemm = _gemm_ex()
        if gemm is not None and tf32:
            _call(gemm, a, b, out, _COMPUTE_32F_FAST_TF32)
            return
        if gemm is not None:
            for first in range(0, a.shape[1], SUMMED_AT_ONCE):
                part = slice(first, first + SUMMED_AT_ONCE)
                _call(gemm, a[:, part], b[part], out, _COMPUTE_32F_PEDANTIC, add=first > 0)
            return
    torch.mm(a, b, out=out)


def taken_as_they_lie(m: int, k: int, n: int, like: Tensor, tf32: bool) -> bool:
    """Return whether `product` of [m, k] and [k, n] gains nothing by padded operands or result.

    Args:
        m: as said.
        k: as said.
        n: as said.
        like: a tensor of their type and device.
        tf32: as `product` is given it.
    """
    return (
        not tf32
        and like.dtype is torch.float32
        and like.is_cuda
        and why_not_size(m, k, n, like.get_device()) is None
    )


def dense_product(a: Tensor, b: Tensor, columns: int, tf32: bool) -> Tensor:
    """Return the first columns of a [m, k] times b [k, n], dense: [m, columns].

    Args:
        a: as `product` takes it.
        b: its rows contiguous.
        columns: how many are wanted; b may have more, whose products then cost less than a copy.
        tf32: whether fp32 operands may be rounded to TF32.
    """
    if taken_as_they_lie(a.shape[0], a.shape[1], columns, a, tf32):
        out = a.new_empty(a.shape[0], columns)
        product(a, b[:, :columns], out, tf32)
        return out
    width = common_width(b)
    wide = a.new_empty(a.shape[0], width)
    product(a, padded(b, width).whole, wide, tf32)
    return wide[:, :columns].contiguous()


@dataclass(frozen=True)
class Padded:
    """A matrix as products want it: itself, or a copy with columns of zeros added.

    `ones` is the index of an added column of ones, where there is one.
    """

    whole: Tensor
    ones: int | None = None


def common_width(*matrices: Tensor, ones: bool = False) -> int:
    """Return the length of row to which `padded` should bring matrices of equally many columns.

    Args:
        matrices: their rows contiguous.
        ones: whether there shall be room for a column of ones, if there are copies anyway.
    """
    columns = matrices[0].shape[1]
    is_good = all(
        columns % _PADDED_TO == 0
        and matrix.stride(0) % _PADDED_TO == 0
        and matrix.data_ptr() % 16 == 0
        for matrix in matrices
    )
    if is_good or max(matrix.numel() for matrix in matrices) < _WORTH_PADDING:
        return columns
    return -(-(columns + ones) // _PADDED_TO) * _PADDED_TO


def padded(matrix: Tensor, width: int, ones: bool = False) -> Padded:
    """Return a matrix with rows of `width`, copied if it has others.

    Args:
        matrix: its rows contiguous.
        width: what `common_width` returned.
        ones: whether one of the new columns, if there are any, shall be ones.
    """
    rows, columns = matrix.shape
    if width == columns:
        return Padded(matrix)
    room = matrix.new_empty(rows, width)
    _copy(matrix, room, columns if ones else -1)
    return Padded(room, columns if ones else None)


def column_sums(matrix: Tensor) -> Tensor:
    """Return the sum over rows, whose chains of fp32 additions are short.

    `Tensor.sum` takes scratch memory of several times the matrix for this shape.

    Args:
        matrix: its rows contiguous.
    """
    rows, columns = matrix.shape
    if not matrix.is_cuda or matrix.dtype is not torch.float32 or not matrix.numel():
        ones = matrix.new_ones(rows, _PADDED_TO)
        sums = matrix.new_empty(columns, _PADDED_TO)
        torch.mm(matrix.t(), ones, out=sums)
        return sums[:, 0].contiguous()
    parts = -(-rows // SUMMED_AT_ONCE)
    sums = _column_sums(matrix, matrix.new_empty(parts, columns), SUMMED_AT_ONCE)
    if parts > 1:
        sums = _column_sums(sums, matrix.new_empty(1, columns), parts)
    return sums[0]


def _column_sums(matrix: Tensor, sums: Tensor, rows_at_once: int) -> Tensor:
    device, (rows, columns) = matrix.get_device(), matrix.shape
    _sum_kernel(device).launch(
        sums.shape[0] * -(-columns // 32),
        torch._C._cuda_getCurrentRawStream(device),
        matrix.data_ptr(),
        sums.data_ptr(),
        rows,
        columns,
        matrix.stride(0),
        rows_at_once,
    )
    return sums


@functools.cache
def _sum_kernel(device: int) -> jit.Kernel:
    text = jit.program_text(["rnn/column_sums.cu"], {"SUM_THREADS": _SUM_THREADS}, {})
    return jit.load(text, "hfai_rnn_column_sums", device, block=_SUM_THREADS)


def _copy(matrix: Tensor, room: Tensor, ones: int) -> None:
    columns = matrix.shape[1]
    if not matrix.is_cuda:
        room.zero_()[:, :columns] = matrix
        if ones >= 0:
            room[:, ones] = 1
        return
    device = matrix.get_device()
    _pad_kernel(device, matrix.dtype).launch(
        matrix.shape[0],
        torch._C._cuda_getCurrentRawStream(device),
        matrix.data_ptr(),
        room.data_ptr(),
        columns,
        matrix.stride(0),
        room.stride(0),
        ones,
    )


@functools.cache
def _pad_kernel(device: int, dtype: torch.dtype) -> jit.Kernel:
    text = jit.program_text(["rnn/pad.cu"], {"THREADS": _PAD_THREADS}, {"T": dtype})
    return jit.load(text, "hfai_rnn_pad", device, block=_PAD_THREADS)


def _call(
    gemm: ctypes._NamedFuncPointer,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    compute: int,
    add: bool = False,
) -> None:
    """Call cublasGemmEx. It counts by columns, and so computes out^T = b^T a^T.

    Args:
        gemm: cublasGemmEx.
        a: the left operand.
        b: the right one.
        out: where the product goes.
        compute: which arithmetic.
        add: whether it is added to what is there.
    """
    (m, k), n = a.shape, b.shape[1]
    b_operation, b_leading = _as_columns(b)
    a_operation, a_leading = _as_columns(a)
    one, beta = ctypes.c_float(1.0), ctypes.c_float(1.0 if add else 0.0)
    code = gemm(
        torch.cuda.current_blas_handle(),  # type: ignore[no-untyped-call]
        b_operation,
        a_operation,
        n,
        m,
        k,
        ctypes.byref(one),
        b.data_ptr(),
        _CUDA_R_32F,
        b_leading,
        a.data_ptr(),
        _CUDA_R_32F,
        a_leading,
        ctypes.byref(beta),
        out.data_ptr(),
        _CUDA_R_32F,
        out.stride(0),
        compute,
        _DEFAULT_ALGORITHM,
    )
    if code:
        raise RuntimeError(f"cublasGemmEx failed with status {code} for [{m}, {k}] x [{k}, {n}]")


def _as_columns(matrix: Tensor) -> tuple[int, int]:
    """Return cuBLAS's operation and leading dimension for the transpose of a matrix."""
    if matrix.stride(1) == 1:
        return _NO_TRANSPOSE, max(matrix.stride(0), matrix.shape[1])
    return _TRANSPOSE, max(matrix.stride(1), matrix.shape[0])


@functools.cache
def _gemm_ex() -> ctypes._NamedFuncPointer | None:
    """Return cublasGemmEx of the library that torch has loaded, or None."""
    if torch.version.cuda is None:
        return None
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}")
        gemm = library.cublasGemmEx
    except (OSError, AttributeError):
        return None
    integer, pointer = ctypes.c_int, ctypes.c_void_p
    gemm.restype = integer
    matrix = (pointer, integer, integer)
    sizes = (integer,) * 5
    gemm.argtypes = (pointer, *sizes, pointer, *matrix, *matrix, pointer, *matrix, integer, integer)
    return gemm
