"""The module's linear maps: `F.linear`, whose gradients in TF32 are made of faster products.

Without TF32 they are those of `kernels.products`.

cuBLAS multiplies in TF32 at full rate only where both operands' rows lie along the summed
dimension, as Hopper's instructions want them. Forward's do; backward's do not. So, for large
products on Hopper with TF32 allowed,

- the input's gradient dy W is made with a transposed copy of W, which is small;
- the weight's gradient dyᵀ x, where both operands would have to be transposed, is made in fp16,
  which can be read either way: TF32's ten bits of mantissa are fp16's, and each operand is
  multiplied by a power of two that makes the most of fp16's range (halves.cu). Sums are fp32.

Everything else is torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from hfai.kernels import jit, products
from hfai.kernels.attention.precision import allows_tf32
from hfai.kernels.coverage import dense, is_dense, why_not_plain, why_watched

# Multiply-adds of a product from which on a map was measured to be faster here.
LEAST_WORK = 51200 * 1024**2
# Seconds of the weight's gradient on an H200, for a multiply-add and for a byte.
_TF32_TIME, _HALF_TIME, _BYTE_TIME = 2 / 235e12, 2 / 740e12, 1 / 3.6e12
THREADS = 256
_BLOCKS = 8  # of a multiprocessor

# torch 2.8 and later: fp16 operands with an fp32 result.
_HAS_WIDE_RESULTS = hasattr(torch.ops.aten.mm, "dtype")


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return x Wᵀ + b as `torch.nn.functional.linear` does.

    Args:
        x: [..., k].
        weight: [n, k].
        bias: [n] or None.
    """
    if torch.compiler.is_compiling() or why_torchs(x, weight, bias) is not None:
        return products.linear(x, weight, bias)
    return apply_linear(x, weight, bias)


def why_torchs(x: Tensor, weight: Tensor, bias: Tensor | None) -> str | None:
    """Say why a map is torch's alone, or None."""
    if not (torch.is_grad_enabled() and x.dtype is torch.float32 and allows_tf32()):
        return "no gradient is wanted, or products are not made in TF32"
    if torch.is_autocast_enabled("cuda"):
        return "autocast chooses another type"
    for tensor in (x, weight) if bias is None else (x, weight, bias):
        reason = why_not_plain(tensor)
        if reason is not None:
            return reason
        if tensor.dtype is not torch.float32 or not is_dense(tensor):
            return "a tensor is not fp32 or not dense"
        if tensor.get_device() != torch.cuda.current_device():
            return "a tensor is not on the current device"
    if weight.dim() != 2 or x.shape[-1] != weight.shape[1] or x.dim() < 2:
        return "shapes that are torch's to judge"
    if bias is not None and bias.shape != weight.shape[:1]:
        return "a bias whose shape is torch's to judge"
    if x.numel() * weight.shape[0] < LEAST_WORK:
        return "too small to gain"
    reason = jit.why_unavailable(x.get_device()) or why_watched()
    if reason is not None:
        return reason
    if jit.device_limits(x.get_device()).architecture != "sm_90":
        return "measured on Hopper alone"
    return None


class Linear(Function):
    """y = x Wᵀ + b and its gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Multiply as torch does, and keep of the operands what the gradients are made of."""
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        ctx.set_materialize_grads(False)
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[Tensor | None, ...]:
        """Multiply by each operand; by torch's operators where this pass is itself watched."""
        if dy is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        rows = dy.reshape(-1, dy.shape[-1])
        plain = (
            not torch.is_grad_enabled()
            and why_watched() is None
            and why_not_plain(dy) is None
            and dy.dtype is torch.float32
            and allows_tf32()
        )
        with torch.autocast("cuda", enabled=False):
            dx = dweight = None
            if needs_x:
                by = weight.t().contiguous().t() if plain else weight
                dx = torch.mm(rows, by).view(*dy.shape[:-1], -1)
            if needs_weight:
                inputs = x.reshape(-1, x.shape[-1])
                if plain and halves_pay(rows.shape[0], rows.shape[1], inputs.shape[1]):
                    dweight = multiply_halves(rows, inputs)
                else:
                    dweight = torch.mm(rows.t(), inputs)
            return dx, dweight, rows.sum(0) if needs_bias else None


# `apply` without the Python wrapper around it, whose functorch check the caller has made already.
apply_linear: Callable[..., Tensor] = super(Function, Linear).apply


def halves_pay(m: int, n: int, k: int) -> bool:
    """Return whether [m, n]ᵀ [m, k] is faster in fp16, conversions included, than in TF32."""
    converted = m * (n + k) * (4 + 4 + 2)  # read for the largest and again, written
    work = m * n * k
    return (
        _HAS_WIDE_RESULTS
        # A switch of torch's 2.7 and later for sums in fp16, which these scales would overflow.
        and not getattr(torch.backends.cuda.matmul, "allow_fp16_accumulation", False)
        and n % 8 == 0
        and k % 8 == 0
        and work * _HALF_TIME + converted * _BYTE_TIME < 0.9 * work * _TF32_TIME
    )


def multiply_halves(a: Tensor, b: Tensor) -> Tensor:
    """Return aᵀ b of two fp32 matrices [m, n] and [m, k], multiplied as scaled fp16.

    A result's error is TF32's as long as elements lie within 2^28 of their matrix's largest; what
    smaller ones add has an error of up to 2^-40 of the largest. Values that are not finite reach
    those elements that they reach in fp32.
    """
    a_half, b_half, back = to_halves(_aligned(dense(a)), _aligned(dense(b)))
    made: Tensor = torch.ops.aten.mm.dtype(a_half.t(), b_half, torch.float32)
    return made.mul_(back[0]).mul_(back[1])


def _aligned(tensor: Tensor) -> Tensor:
    return tensor.clone() if tensor.data_ptr() % 16 else tensor


def to_halves(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return two fp32 tensors as fp16, and [2] what undoes their scales.

    Args:
        a: dense, starting on 16 bytes, a multiple of four elements.
        b: likewise.
    """
    device = a.get_device()
    largest = torch.zeros(2, dtype=torch.int32, device=a.device)
    halves = [torch.empty_like(t, dtype=torch.float16) for t in (a, b)]
    back = a.new_empty(2)
    vectors = (a.numel() // 4, b.numel() // 4)
    most = max(vectors)
    grid = min(-(-most // THREADS), _BLOCKS * jit.device_limits(device).multiprocessors)
    stream = torch._C._cuda_getCurrentRawStream(device)
    find, convert = (kernel(name, device) for name in ("hfai_largest", "hfai_to_halves"))
    find.launch(grid, stream, a.data_ptr(), b.data_ptr(), largest.data_ptr(), *vectors)
    convert.launch(
        grid,
        stream,
        a.data_ptr(),
        b.data_ptr(),
        halves[0].data_ptr(),
        halves[1].data_ptr(),
        largest.data_ptr(),
        back.data_ptr(),
        *vectors,
    )
    return halves[0], halves[1], back


_kernels: dict[tuple[str, int], jit.Kernel] = {}


def kernel(name: str, device: int) -> jit.Kernel:
    """Return a kernel of halves.cu, compiled on first use and kept."""
    found = _kernels.get((name, device))
    if found is None:
        text = jit.program_text(["mha/halves.cu"], {"THREADS": THREADS}, {})
        found = _kernels[name, device] = jit.load(text, name, device, block=THREADS)
    return found
